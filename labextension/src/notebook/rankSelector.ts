/**
 * Tabs, or a list if there are many ranks, that select the rank to show.
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import { addTabKeys, element, markTab } from '../view/dom';

/** More ranks than this are selected from a list. */
const MAX_TABS = 8;

export class RankSelector {
  readonly node = element('div', { class: 'jdt-rank-tabs' });
  /** null: all ranks. */
  selected: number | null = null;
  private ranks: number[] = [];

  constructor(
    private readonly trans: TranslationBundle,
    private readonly onChange: () => void
  ) {}

  /**
   * Set the ranks.
   *
   * @param panelIds - of the elements that show the output
   */
  update(ranks: number[], panelIds: string[]): void {
    if (ranks.join() !== this.ranks.join() || !this.node.hasChildNodes()) {
      this.ranks = ranks;
      this.node.replaceChildren(
        ranks.length > MAX_TABS ? this.makeList() : this.makeTabs()
      );
      this.mark();
    }
    const ids = panelIds.join(' ');
    for (const control of this.node.querySelectorAll('[role=tab], select')) {
      if (control.getAttribute('aria-controls') !== ids) {
        control.setAttribute('aria-controls', ids);
      }
    }
  }

  select(rank: number | null): void {
    if (rank === this.selected) {
      return;
    }
    this.selected = rank;
    this.mark();
    this.onChange();
  }

  private mark(): void {
    const value = String(this.selected ?? '');
    for (const tab of this.node.querySelectorAll('[role=tab]')) {
      markTab(tab, tab.getAttribute('data-rank') === value);
    }
    const list = this.node.querySelector('select');
    if (list !== null) {
      list.value = value;
    }
  }

  private makeTabs(): HTMLElement {
    const tabs = element('div', {
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
              ? this.trans.__('output of all ranks')
              : this.trans.__('output of rank %1', rank)
        },
        rank === null ? this.trans.__('all') : String(rank)
      );
      tab.addEventListener('click', () => {
        this.select(rank);
      });
      tabs.append(tab);
    }
    addTabKeys(tabs);
    return tabs;
  }

  private makeList(): HTMLElement {
    const list = element('select', {
      'aria-label': this.trans.__('the rank whose output is shown')
    });
    for (const rank of [null, ...this.ranks]) {
      const label =
        rank === null
          ? this.trans.__('all ranks')
          : this.trans.__('rank %1', rank);
      list.append(element('option', { value: String(rank ?? '') }, label));
    }
    list.addEventListener('change', () => {
      this.select(list.value === '' ? null : Number(list.value));
    });
    return list;
  }
}
