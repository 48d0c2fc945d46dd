/**
 * Controls that choose among many ranks: counts per state, a filter, an order.
 *
 * Does not cover: filtering and sorting (rankOrder).
 */

import type { ICluster, RankState, Translate } from '../protocol/types';
import { button, element, setText } from './dom';
import {
  filterRanks,
  isRankOrder,
  type RankOrder,
  rankOrders
} from './rankOrder';
import { countStates } from './summary';

/** Up to this many ranks the table is short enough without controls. */
const FEW_RANKS = 8;

export class RankFilter {
  readonly node: HTMLElement;
  private readonly input: HTMLInputElement;
  private readonly states = element('span', { class: 'jdt-states' });
  private order: RankOrder = 'rank';

  constructor(
    private readonly trans: Translate,
    private readonly onChange: (filter: string, order: RankOrder) => void
  ) {
    const hint = trans(
      'ranks to show, in the table and in the plots: "0-7,12", or a part of a state, host or device'
    );
    this.input = element('input', {
      type: 'search',
      placeholder: trans('filter ranks'),
      title: hint,
      'aria-label': hint
    });
    this.input.addEventListener('input', () => {
      this.notify();
    });
    const select = element('select', { 'aria-label': trans('order') });
    for (const [value, text] of rankOrders(trans)) {
      select.append(element('option', { value }, text));
    }
    select.addEventListener('change', () => {
      if (isRankOrder(select.value)) {
        this.order = select.value;
        this.notify();
      }
    });
    this.node = element(
      'div',
      { class: 'jdt-filter', hidden: '' },
      this.states,
      this.input,
      select
    );
  }

  private notify(): void {
    this.onChange(this.input.value, this.order);
  }

  /** The ranks that match; null without a filter. */
  matching(cluster: ICluster): ReadonlySet<number> | null {
    return filterRanks(cluster.ranks, this.input.value);
  }

  show(cluster: ICluster): void {
    this.node.hidden = cluster.ranks.length <= FEW_RANKS;
    if (this.node.hidden) {
      return;
    }
    const counts = countStates(cluster.ranks);
    const key = counts.map(each => each.state).join();
    if (this.states.dataset.key !== key) {
      this.states.dataset.key = key;
      this.states.replaceChildren(
        ...counts.map(({ state }) => this.makeChip(state))
      );
    }
    counts.forEach(({ state, count }, index) => {
      const chip = this.states.children[index];
      if (chip !== undefined) {
        setText(chip, `${String(count)} ${this.trans(state)}`);
        chip.setAttribute(
          'aria-pressed',
          String(this.input.value === this.trans(state))
        );
      }
    });
  }

  /** A button that filters by a state. */
  private makeChip(state: RankState): HTMLButtonElement {
    const text = this.trans(state);
    const title = this.trans('show only these ranks, or all');
    const made = button('', title, () => {
      this.input.value = this.input.value === text ? '' : text;
      this.notify();
    });
    made.classList.add('jdt-chip');
    made.dataset.state = state;
    return made;
  }
}
