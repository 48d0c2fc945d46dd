/**
 * Nodes and their ranks as a tree in a table.
 *
 * Covers: one row per node, which opens, and per rank, or ranks alone in
 * another order; the columns that fit; drawing only what is seen, so that many
 * ranks cost no more than few.
 * Does not cover: which ranks (order), plots (charts).
 */

import { columnsOf, Fitting, type IColumn } from './columns';
import { button, bytes, element, perSecond, setText } from './dom';
import { type Order, passes, sorted } from './order';
import type { ICluster, INode, IRank, Translate } from './types';

const ROW_HEIGHT = 24;
/** From how many rows on only those in sight are there. */
const MOST_ROWS = 60;
const SPARE_ROWS = 6;
/** Below this width of the table, in px, all is set closer. */
const NARROW = 420;
const NARROW_STATE = 9;

let tablesMade = 0;

type Row =
  | { kind: 'node'; host: string; node: INode | undefined; ranks: IRank[] }
  | { kind: 'rank'; rank: IRank };

/** The table. */
export class RankTable {
  readonly node: HTMLElement;
  private readonly body: HTMLElement;
  private readonly head: HTMLElement;
  private readonly scroller: HTMLElement;
  private readonly closed = new Set<string>();
  private readonly columns: IColumn[];
  private readonly fitting = new Fitting();
  private readonly others: HTMLButtonElement;
  private shown: IColumn[] = [];
  private filled: IColumn[] = [];
  private rows: Row[] = [];
  private chosen = -1;
  private chosenKey = '';
  private isNarrow = false;
  private showsAll = false;
  private filter = '';
  private order: Order = 'rank';
  private opensLogs = true;
  private isOneNode = false;
  private drawn = { first: 0, last: 0 };
  private readonly table: HTMLElement;
  private readonly id = `jdt-table-${String(++tablesMade)}`;

  constructor(
    private readonly trans: Translate,
    private readonly onRank: (rank: number) => void
  ) {
    this.columns = columnsOf(trans);
    this.head = element('tr', { role: 'row' });
    this.body = element('tbody');
    this.table = element(
      'table',
      {
        class: 'jdt-table',
        role: 'treegrid',
        tabindex: '0',
        'data-lm-suppress-shortcuts': 'true',
        'aria-label': trans('nodes and ranks')
      },
      element('thead', {}, this.head),
      this.body
    );
    this.scroller = element('div', { class: 'jdt-table-scroller' }, this.table);
    this.scroller.addEventListener('scroll', () => {
      const { first, last } = this.inSight();
      if (first < this.drawn.first || last > this.drawn.last) {
        this.draw();
      }
    });
    this.table.addEventListener('keydown', event => {
      this.onKey(event);
    });
    this.others = button(
      '',
      trans('show all columns, or those that fit'),
      () => {
        this.showsAll = !this.showsAll;
        this.onToggle();
      }
    );
    this.others.classList.add('jdt-link');
    this.node = element('div', {}, this.scroller, this.others);
  }

  /** Show the ranks that pass a filter, in an order. */
  select(filter: string, order: Order): void {
    this.filter = filter;
    this.order = order;
  }

  /** Its logs can't be read any more. */
  freeze(): void {
    this.opensLogs = false;
    this.table.classList.add('jdt-frozen');
  }

  show(cluster: ICluster): void {
    this.isOneNode = cluster.nodes.length === 1;
    const ranks = cluster.ranks.filter(rank => passes(rank, this.filter));
    this.rows =
      this.order === 'rank'
        ? this.tree(cluster, ranks)
        : sorted(ranks, this.order).map(rank => ({ kind: 'rank', rank }));
    this.chosen = this.rows.findIndex(row => keyOf(row) === this.chosenKey);
    this.chooseColumns(cluster.ranks);
    this.draw();
  }

  private tree(cluster: ICluster, passing: IRank[]): Row[] {
    const hosts = [...new Set(passing.map(rank => rank.host))];
    return hosts.flatMap(host => {
      const ranks = passing.filter(rank => rank.host === host);
      const node = cluster.nodes.find(each => each.host === host);
      const open: Row[] = this.closed.has(host)
        ? []
        : ranks.map(rank => ({ kind: 'rank', rank }));
      return [{ kind: 'node', host, node, ranks } satisfies Row, ...open];
    });
  }

  private chooseColumns(ranks: IRank[]): void {
    const width = this.scroller.clientWidth;
    const isNarrow = width < NARROW;
    this.table.classList.toggle('jdt-narrow', isNarrow);
    this.filled = this.columns.filter(column =>
      ranks.some(rank => column.text(rank) !== null)
    );
    const { fontSize, fontFamily } = getComputedStyle(this.table);
    const fitting = this.fitting.fit(this.filled, ranks, {
      width,
      padding: isNarrow ? 6 : 16,
      font: `${fontSize} ${fontFamily}`,
      mostState: isNarrow ? NARROW_STATE : Number.POSITIVE_INFINITY
    });
    const left = this.filled.length - fitting.length;
    this.others.hidden = left === 0;
    setText(
      this.others,
      this.showsAll
        ? this.trans('fewer columns')
        : this.trans('%1 more columns', String(left))
    );
    const shown = this.showsAll ? this.filled : fitting;
    if (
      isNarrow !== this.isNarrow ||
      shown.length !== this.shown.length ||
      shown.some((each, at) => each !== this.shown[at])
    ) {
      this.shown = shown;
      this.isNarrow = isNarrow;
      this.head.replaceChildren(
        ...shown.map(column =>
          element(
            'th',
            { scope: 'col', class: column.align ?? '', title: column.title },
            isNarrow ? column.brief : column.title
          )
        )
      );
      this.body.replaceChildren();
    }
  }

  /** Which rows can be seen; of a short table all. */
  private inSight(): { first: number; last: number } {
    const count = this.rows.length;
    if (count <= MOST_ROWS) {
      return { first: 0, last: count };
    }
    const first = Math.floor(this.scroller.scrollTop / ROW_HEIGHT);
    const seen = Math.ceil((this.scroller.clientHeight || 400) / ROW_HEIGHT);
    return { first, last: Math.min(count, first + seen) };
  }

  /** Draw the rows in sight and some around them, with room for the others. */
  private draw(): void {
    const sight = this.inSight();
    const first = Math.max(0, sight.first - SPARE_ROWS);
    const last = Math.min(this.rows.length, sight.last + SPARE_ROWS);
    this.drawn = { first, last };
    // There all rows have to be one line high.
    this.table.classList.toggle('jdt-long', last - first < this.rows.length);
    const wanted = last - first;
    while (this.body.childElementCount > wanted) {
      this.body.lastElementChild?.remove();
    }
    while (this.body.childElementCount < wanted) {
      this.body.append(element('tr', { role: 'row' }));
    }
    // Rows, and the one of the titles.
    this.table.setAttribute('aria-rowcount', String(this.rows.length + 1));
    const lines = [...this.body.children];
    for (let at = first; at < last; at++) {
      const row = this.rows[at];
      const line = lines[at - first];
      if (row !== undefined && line instanceof HTMLTableRowElement) {
        this.fill(line, row, at);
      }
    }
    this.body.style.setProperty(
      '--jdt-above',
      `${String(first * ROW_HEIGHT)}px`
    );
    const below = (this.rows.length - last) * ROW_HEIGHT;
    this.body.style.setProperty('--jdt-below', `${String(below)}px`);
  }

  private fill(line: HTMLTableRowElement, row: Row, at: number): void {
    line.id = `${this.id}-${String(at)}`;
    line.setAttribute('aria-rowindex', String(at + 2));
    if (row.kind === 'node') {
      this.fillNode(line, row);
      line.classList.toggle('jdt-chosen', at === this.chosen);
      return;
    }
    line.className = `jdt-rank${at === this.chosen ? ' jdt-chosen' : ''}`;
    line.dataset.state = row.rank.state;
    line.setAttribute('aria-level', this.order === 'rank' ? '2' : '1');
    line.removeAttribute('aria-expanded');
    line.title = this.describe(row.rank);
    line.onclick = (): void => {
      this.activate(row);
    };
    while (line.cells.length > this.shown.length) {
      line.deleteCell(-1);
    }
    this.shown.forEach((column, index) => {
      const cell = line.cells[index] ?? line.insertCell();
      cell.removeAttribute('colspan');
      cell.className = column.align ?? '';
      setText(cell, column.text(row.rank) ?? '');
    });
  }

  /** All that is known of a rank, also what has no room in the table. */
  private describe(rank: IRank): string {
    const known = this.filled.map(
      column => `${column.title}: ${column.text(rank) ?? '–'}`
    );
    const hint = this.trans('show the log of rank %1', String(rank.rank));
    return [...(this.opensLogs ? [hint] : []), ...known, rank.host].join('\n');
  }

  private fillNode(
    line: HTMLTableRowElement,
    row: Extract<Row, { kind: 'node' }>
  ): void {
    const isOpen = !this.closed.has(row.host);
    line.className = 'jdt-node';
    delete line.dataset.state;
    line.setAttribute('aria-level', '1');
    line.setAttribute('aria-expanded', String(isOpen));
    const figures = this.ofNode(row.node, row.ranks);
    const text = `${row.host} · ${figures.brief}`;
    line.title = `${[row.host, ...figures.all].join('\n')}\n${
      isOpen ? this.trans('hide its ranks') : this.trans('show its ranks')
    }`;
    line.onclick = (): void => {
      this.toggle(row.host);
    };
    while (line.cells.length > 1) {
      line.deleteCell(-1);
    }
    const cell = line.cells[0] ?? line.insertCell();
    cell.setAttribute('colspan', String(Math.max(1, this.shown.length)));
    cell.className = '';
    let inner = cell.firstElementChild;
    if (!(inner instanceof HTMLSpanElement)) {
      inner = element('span');
      cell.replaceChildren(inner);
    }
    setText(inner, `${isOpen ? '▾' : '▸'} ${text}`);
  }

  /** A node in a line: in brief, and all that is known of it. */
  private ofNode(
    node: INode | undefined,
    ranks: IRank[]
  ): { brief: string; all: string[] } {
    const t = this.trans;
    const count = rankCount(ranks.length, t);
    if (node === undefined) {
      return { brief: count, all: [count] };
    }
    const load = t('load %1', node.load.toFixed(1));
    const [used, total] = [node.memory_used_bytes, node.memory_total_bytes];
    const network = `↓ ${perSecond(node.received_bytes_per_s)} ↑ ${perSecond(node.sent_bytes_per_s)}`;
    const infiniband =
      node.infiniband_received_bytes_per_s + node.infiniband_sent_bytes_per_s;
    const busy = node.cpu_percent.toFixed(0);
    return {
      // Of the only node the header says how many ranks there are.
      brief: [
        ...(this.isOneNode ? [] : [count]),
        load,
        `${(used / 2 ** 30).toFixed(1)}/${bytes(total)}`
      ].join(' · '),
      all: [
        count,
        t('%1 cores %2 % busy', String(node.cores), busy),
        load,
        t('memory %1 of %2', bytes(used), bytes(total)),
        t('disk %1 free', bytes(node.disk_free_bytes)),
        network,
        ...(infiniband > 0 ? [t('InfiniBand %1', perSecond(infiniband))] : [])
      ]
    };
  }

  private toggle(host: string): void {
    if (!this.closed.delete(host)) {
      this.closed.add(host);
    }
    this.onToggle();
  }

  /** Set by the view: draws again with what it was given last. */
  onToggle: () => void = () => undefined;

  private onKey(event: KeyboardEvent): void {
    if (this.rows.length === 0) {
      return;
    }
    const row = this.rows[this.chosen];
    const isOpen = row?.kind === 'node' && !this.closed.has(row.host);
    const last = this.rows.length - 1;
    const moves: Record<string, number> = {
      ArrowDown: Math.min(last, this.chosen + 1),
      ArrowUp: Math.max(0, this.chosen - 1),
      Home: 0,
      End: last
    };
    const to = moves[event.key];
    if (to !== undefined) {
      this.choose(to);
    } else if (row === undefined) {
      return;
    } else if (event.key === 'Enter' || event.key === ' ') {
      this.activate(row);
    } else if (event.key === 'ArrowLeft' && row.kind === 'rank') {
      const above = this.rows.slice(0, this.chosen);
      this.choose(above.map(each => each.kind).lastIndexOf('node'));
    } else if (event.key === 'ArrowRight' && isOpen) {
      this.choose(this.chosen + 1);
    } else if (
      row.kind === 'node' &&
      ((event.key === 'ArrowLeft' && isOpen) || event.key === 'ArrowRight')
    ) {
      this.toggle(row.host);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  private activate(row: Row): void {
    if (row.kind === 'node') {
      this.toggle(row.host);
    } else if (this.opensLogs) {
      this.onRank(row.rank.rank);
    }
  }

  /** Go to a row, with the keyboard. */
  private choose(at: number): void {
    const row = this.rows[at];
    if (row === undefined) {
      return;
    }
    this.chosen = at;
    this.chosenKey = keyOf(row);
    if (this.rows.length > MOST_ROWS) {
      // Only rows in sight are there to be scrolled to.
      const top = at * ROW_HEIGHT;
      const seen = this.scroller.clientHeight - ROW_HEIGHT; // without the titles
      const least = top + ROW_HEIGHT - seen;
      this.scroller.scrollTop = Math.min(
        top,
        Math.max(this.scroller.scrollTop, least)
      );
    }
    this.draw();
    const line = this.body.querySelector('.jdt-chosen');
    line?.scrollIntoView({ block: 'nearest' });
    this.table.setAttribute('aria-activedescendant', line?.id ?? '');
  }
}

function keyOf(row: Row): string {
  return row.kind === 'node'
    ? `node ${row.host}`
    : `rank ${String(row.rank.rank)}`;
}

/** A number of ranks, in words. */
export function rankCount(count: number, trans: Translate): string {
  return count === 1 ? trans('1 rank') : trans('%1 ranks', String(count));
}
