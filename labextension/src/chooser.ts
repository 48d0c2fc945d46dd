/**
 * A row of tabs, or a list, in which a rank is chosen.
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import { arrowKeys, element, markTab } from './view/dom';

/** Past this many ranks tabs are too many: a list is chosen from. */
const MOST_TABS = 8;

export class RankChooser {
  readonly node = element('div', { class: 'jdt-rank-tabs' });
  chosen: number | null = null;
  private ranks: number[] = [];

  constructor(
    private readonly trans: TranslationBundle,
    private readonly onChange: () => void
  ) {}

  /** Offer ranks; what is chosen is shown in elements with these ids. */
  offer(ranks: number[], panels: string[]): void {
    if (ranks.join() !== this.ranks.join() || !this.node.hasChildNodes()) {
      this.ranks = ranks;
      this.node.replaceChildren(
        ranks.length > MOST_TABS ? this.makeList() : this.makeTabs()
      );
      this.mark();
    }
    const ids = panels.join(' ');
    for (const control of this.node.querySelectorAll('[role=tab], select')) {
      if (control.getAttribute('aria-controls') !== ids) {
        control.setAttribute('aria-controls', ids);
      }
    }
  }

  choose(rank: number | null): void {
    if (rank === this.chosen) {
      return;
    }
    this.chosen = rank;
    this.mark();
    this.onChange();
  }

  private mark(): void {
    const value = String(this.chosen ?? '');
    for (const tab of this.node.querySelectorAll('[role=tab]')) {
      markTab(tab, tab.getAttribute('data-rank') === value);
    }
    const list = this.node.querySelector('select');
    if (list !== null) {
      list.value = value;
    }
  }

  private makeTabs(): HTMLElement {
    const bar = element('div', {
      role: 'tablist',
      'aria-label': this.trans.__('ranks')
    });
    for (const rank of [null, ...this.ranks]) {
      const tab = element(
        'button',
        {
          type: 'button',
          role: 'tab',
          'data-rank': String(rank ?? ''),
          title:
            rank === null
              ? this.trans.__('what all ranks printed')
              : this.trans.__('what rank %1 printed', rank)
        },
        rank === null ? this.trans.__('all') : String(rank)
      );
      tab.addEventListener('click', () => {
        this.choose(rank);
      });
      bar.append(tab);
    }
    arrowKeys(bar);
    return bar;
  }

  private makeList(): HTMLElement {
    const list = element('select', {
      'aria-label': this.trans.__('the rank whose output is shown')
    });
    for (const rank of [null, ...this.ranks]) {
      const words =
        rank === null
          ? this.trans.__('all ranks')
          : this.trans.__('rank %1', rank);
      list.append(element('option', { value: String(rank ?? '') }, words));
    }
    list.addEventListener('change', () => {
      this.choose(list.value === '' ? null : Number(list.value));
    });
    return list;
  }
}
