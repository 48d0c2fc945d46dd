/**
 * What many ranks are chosen by: their states, a filter, an order.
 *
 * Covers: how many ranks are in which state, the controls.
 * Does not cover: what passes and how it is sorted (order).
 */

import { button, element, setText } from './dom';
import { isOrder, type Order, ordersOf, passes } from './order';
import type { ICluster, RankState, Translate } from './types';

/** Up to this many ranks are seen at a glance. */
const FEW_RANKS = 8;
const STATES: RankState[] = [
  'running',
  'in collective',
  'not responding',
  'dead',
  'starting',
  'idle',
  'ended'
];

export class Chooser {
  readonly node: HTMLElement;
  private readonly input: HTMLInputElement;
  private readonly states = element('span', { class: 'jdt-states' });
  private order: Order = 'rank';

  constructor(
    private readonly trans: Translate,
    private readonly onChange: (filter: string, order: Order) => void
  ) {
    const hint = trans(
      'ranks to show, in the table and in the plots: "0-7,12", or a part of a state, host or device'
    );
    this.input = element('input', {
      type: 'search',
      placeholder: trans('filter: 0-7, dead, …'),
      title: hint,
      'aria-label': hint
    });
    this.input.addEventListener('input', () => {
      this.change();
    });
    const select = element('select', { 'aria-label': trans('order') });
    for (const [value, text] of ordersOf(trans)) {
      select.append(element('option', { value }, text));
    }
    select.addEventListener('change', () => {
      if (isOrder(select.value)) {
        this.order = select.value;
        this.change();
      }
    });
    this.node = element(
      'div',
      { class: 'jdt-chooser', hidden: '' },
      this.states,
      this.input,
      select
    );
  }

  private change(): void {
    this.onChange(this.input.value, this.order);
  }

  /** The ranks that are chosen; null where all are. */
  chosen(cluster: ICluster): ReadonlySet<number> | null {
    const filter = this.input.value;
    return filter.trim()
      ? new Set(
          cluster.ranks
            .filter(rank => passes(rank, filter))
            .map(each => each.rank)
        )
      : null;
  }

  show(cluster: ICluster): void {
    this.node.hidden = cluster.ranks.length <= FEW_RANKS;
    if (this.node.hidden) {
      return;
    }
    const counts = countsOf(cluster);
    const key = counts.map(each => each.state).join();
    if (this.states.dataset.key !== key) {
      this.states.dataset.key = key;
      this.states.replaceChildren(
        ...counts.map(({ state }) => this.chip(state))
      );
    }
    counts.forEach(({ state, count }, at) => {
      const chip = this.states.children[at];
      if (chip !== undefined) {
        setText(chip, `${String(count)} ${this.trans(state)}`);
        chip.setAttribute(
          'aria-pressed',
          String(this.input.value === this.trans(state))
        );
      }
    });
  }

  private chip(state: RankState): HTMLButtonElement {
    const word = this.trans(state);
    const made = button('', this.trans('show only these, or all'), () => {
      this.input.value = this.input.value === word ? '' : word;
      this.change();
    });
    made.classList.add('jdt-chip');
    made.dataset.state = state;
    return made;
  }
}

/** How many ranks are in which state, without those that none is in. */
export function countsOf({
  ranks
}: ICluster): { state: RankState; count: number }[] {
  return STATES.map(state => ({
    state,
    count: ranks.filter(rank => rank.state === state).length
  })).filter(each => each.count > 0);
}
