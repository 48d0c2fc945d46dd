/**
 * Small helpers for plain DOM.
 */

import { unitOf } from './scales';

type Attributes = Record<string, string>;

/** Make an element with attributes and children. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Set a text only where it changes: a screen reader reads every change. */
export function setText(node: Element, text: string): void {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

/** A button with a text that says what it does. */
export function button(
  label: string,
  title: string,
  onClick: () => void
): HTMLButtonElement {
  const made = element(
    'button',
    { type: 'button', class: 'jdt-button', title },
    label
  );
  made.addEventListener('click', onClick);
  return made;
}

/** Have the browser save a text as a file. */
export function download(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: 'text/plain' }));
  const link = element('a', { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}

/** Left and right go from button to button; the Tab key stops at one alone. */
export function toolbarKeys(toolbar: HTMLElement): void {
  const usable = (): HTMLButtonElement[] =>
    [...toolbar.querySelectorAll('button')].filter(each => !each.disabled);
  const mark = (chosen: HTMLButtonElement | undefined): void => {
    for (const each of toolbar.querySelectorAll('button')) {
      each.tabIndex = each === chosen ? 0 : -1;
    }
  };
  mark(usable()[0]);
  toolbar.addEventListener('focusin', ({ target }) => {
    mark(usable().find(each => each === target));
  });
  toolbar.addEventListener('keydown', event => {
    const buttons = usable();
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined || buttons.length === 0) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    const at = buttons.findIndex(each => each === event.target) + step;
    buttons[(at + buttons.length) % buttons.length]?.focus();
  });
}

/** Left and right go from tab to tab, as in every list of tabs. */
export function arrowKeys(list: HTMLElement): void {
  list.addEventListener('keydown', event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const tabs = [...list.querySelectorAll<HTMLElement>('[role=tab]')];
    if (step === undefined || tabs.length === 0) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    const at = tabs.findIndex(tab => tab.ariaSelected === 'true') + step;
    const next = tabs[(at + tabs.length) % tabs.length];
    next?.click();
    next?.focus();
  });
}

/** Mark a tab as the chosen one, where the Tab key goes, or as another. */
export function markTab(tab: Element, isChosen: boolean): void {
  tab.setAttribute('aria-selected', String(isChosen));
  tab.setAttribute('tabindex', isChosen ? '0' : '-1');
}

export function bytes(value: number): string {
  const { name, size } = unitOf(value);
  return `${(value / size).toFixed(name === 'GiB' ? 1 : 0)} ${name}`;
}

export function perSecond(size: number): string {
  if (size >= 1e9) {
    return `${(size / 1e9).toFixed(1)} GB/s`;
  }
  if (size >= 1e6) {
    return `${(size / 1e6).toFixed(1)} MB/s`;
  }
  return size >= 1e3
    ? `${(size / 1e3).toFixed(0)} kB/s`
    : `${size.toFixed(0)} B/s`;
}

export function duration(seconds: number): string {
  if (seconds < 120) {
    return `${seconds.toFixed(0)} s`;
  }
  return seconds < 7200
    ? `${(seconds / 60).toFixed(0)} min`
    : `${(seconds / 3600).toFixed(1)} h`;
}

/** A number with some significant digits. */
export function short(value: number, digits = 4): string {
  if (value === 0) {
    return '0';
  }
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3
    ? value.toExponential(2)
    : value.toLocaleString('en', { maximumSignificantDigits: digits });
}
