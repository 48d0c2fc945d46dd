/**
 * Helpers for plain DOM.
 */

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

/** Set a text only if it changes: screen readers announce every assignment. */
export function setText(node: Element, text: string): void {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

/** A button with a label and a tooltip. */
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

/** Returns the width of a text in px. */
export type MeasureText = (text: string, font: string) => number;

/** Measure texts with a canvas, which needs no layout. */
export function makeMeasure(): MeasureText {
  const context = document.createElement('canvas').getContext('2d');
  return (text, font) => {
    if (context === null) {
      return 0; // no canvas, as with some privacy settings
    }
    context.font = font;
    return context.measureText(text).width;
  };
}

/** Save a text as a file through the browser. */
export function download(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: 'text/plain' }));
  const link = element('a', { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}

/** Make arrow keys move between buttons; the Tab key stops at one of them. */
export function addToolbarKeys(toolbar: HTMLElement): void {
  const enabled = (): HTMLButtonElement[] =>
    [...toolbar.querySelectorAll('button')].filter(each => !each.disabled);
  const setTabStop = (stop: HTMLButtonElement | undefined): void => {
    for (const each of toolbar.querySelectorAll('button')) {
      each.tabIndex = each === stop ? 0 : -1;
    }
  };
  setTabStop(enabled()[0]);
  toolbar.addEventListener('focusin', ({ target }) => {
    setTabStop(enabled().find(each => each === target));
  });
  onArrowKeys(toolbar, step => {
    const buttons = enabled();
    const at = buttons.findIndex(each => each.tabIndex === 0);
    buttons.at((at + step) % buttons.length)?.focus();
  });
}

/** Make arrow keys select the next tab, as the ARIA tabs pattern requires. */
export function addTabKeys(list: HTMLElement): void {
  onArrowKeys(list, step => {
    const tabs = [...list.querySelectorAll<HTMLElement>('[role=tab]')];
    const at = tabs.findIndex(tab => tab.ariaSelected === 'true');
    const next = tabs.at((at + step) % tabs.length);
    next?.click();
    next?.focus();
  });
}

/** Call a function with -1 for the left arrow key and 1 for the right one. */
function onArrowKeys(node: HTMLElement, move: (step: number) => void): void {
  node.addEventListener('keydown', event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      event.stopPropagation();
      move(step);
    }
  });
}

/** Mark a tab as selected, where the Tab key stops, or as not selected. */
export function markTab(tab: Element, isSelected: boolean): void {
  tab.setAttribute('aria-selected', String(isSelected));
  tab.setAttribute('tabindex', isSelected ? '0' : '-1');
}
