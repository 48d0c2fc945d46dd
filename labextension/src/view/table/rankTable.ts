/**
 * Nodes and their ranks as a tree in a table.
 *
 * Covers: drawing only the rows in view, so that many ranks cost no more than
 * few; selecting, collapsing, the keyboard.
 * Does not cover: rows and keys (rows), columns (columns, columnFit).
 */

import type { ICluster, IRank, Translate } from '../../protocol/types';
import { button, element, makeMeasure, setText } from '../dom';
import type { RankOrder } from '../rankOrder';
import { ColumnFit } from './columnFit';
import { type IColumn, makeColumns } from './columns';
import { describeNode } from './nodeText';
import {
  extendRange,
  type INodeRow,
  type IRankRow,
  type IRowRange,
  keyAction,
  makeRows,
  type Row,
  rowKey,
  visibleRows
} from './rows';

const ROW_HEIGHT = 24;
/** More rows than this are drawn only while they are in view. */
const MAX_DRAWN_ROWS = 60;
/** Rows drawn beyond those in view, on each side. */
const EXTRA_ROWS = 6;
/** Below this width in px the table is narrow: less padding, short titles. */
const NARROW = 420;
const NARROW_STATE_LENGTH = 9;
const PADDING = { wide: 16, narrow: 6 };
/** Assumed before the table is laid out. */
const DEFAULT_HEIGHT = 400;

let tableCount = 0;

export class RankTable {
  readonly node: HTMLElement;
  private readonly table: HTMLElement;
  private readonly head: HTMLElement;
  private readonly body: HTMLElement;
  private readonly scroller: HTMLElement;
  private readonly columnsButton: HTMLButtonElement;
  private readonly collapsed = new Set<string>();
  private readonly columns: IColumn[];
  private readonly columnFit = new ColumnFit(makeMeasure());
  /** Columns that are shown. */
  private shown: IColumn[] = [];
  /** Columns that are not empty. */
  private filled: IColumn[] = [];
  private rows: Row[] = [];
  private selected = -1;
  private selectedKey = '';
  private isNarrow = false;
  private showsAllColumns = false;
  private filter = '';
  private order: RankOrder = 'rank';
  private opensLogs = true;
  private isOneNode = false;
  private drawn: IRowRange = { first: 0, last: 0 };
  private readonly id = `jdt-table-${String(++tableCount)}`;

  /**
   * @param onRank - called with a rank whose log is to be shown
   * @param onToggle - called when the rows or columns have changed
   */
  constructor(
    private readonly trans: Translate,
    private readonly onRank: (rank: number) => void,
    private readonly onToggle: () => void
  ) {
    this.columns = makeColumns(trans);
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
      const { first, last } = this.rowsInView();
      if (first < this.drawn.first || last > this.drawn.last) {
        this.draw();
      }
    });
    this.table.addEventListener('keydown', event => {
      this.onKey(event);
    });
    this.columnsButton = button(
      '',
      trans('show all columns, or those that fit'),
      () => {
        this.showsAllColumns = !this.showsAllColumns;
        this.onToggle();
      }
    );
    this.columnsButton.classList.add('jdt-link');
    this.node = element('div', {}, this.scroller, this.columnsButton);
  }

  /** Show the ranks that match a filter, in an order, from the next draw on. */
  setFilter(filter: string, order: RankOrder): void {
    this.filter = filter;
    this.order = order;
  }

  /** Stop opening logs: they cannot be read any more. */
  freeze(): void {
    this.opensLogs = false;
    this.table.classList.add('jdt-frozen');
  }

  show(cluster: ICluster): void {
    this.isOneNode = cluster.nodes.length === 1;
    this.rows = makeRows(cluster, {
      filter: this.filter,
      order: this.order,
      collapsed: this.collapsed
    });
    this.selected = this.rows.findIndex(
      row => rowKey(row) === this.selectedKey
    );
    this.chooseColumns(cluster.ranks);
    this.draw();
  }

  private chooseColumns(ranks: IRank[]): void {
    const width = this.scroller.clientWidth;
    const isNarrow = width < NARROW;
    this.table.classList.toggle('jdt-narrow', isNarrow);
    this.filled = this.columns.filter(column =>
      ranks.some(rank => column.text(rank) !== null)
    );
    const { fontSize, fontFamily } = getComputedStyle(this.table);
    const fitting = this.columnFit.fit(this.filled, ranks, {
      width,
      padding: isNarrow ? PADDING.narrow : PADDING.wide,
      font: `${fontSize} ${fontFamily}`,
      maxStateLength: isNarrow ? NARROW_STATE_LENGTH : Number.POSITIVE_INFINITY
    });
    const omitted = this.filled.length - fitting.length;
    this.columnsButton.hidden = omitted === 0;
    setText(
      this.columnsButton,
      this.showsAllColumns
        ? this.trans('fewer columns')
        : this.trans('%1 more columns', String(omitted))
    );
    const shown = this.showsAllColumns ? this.filled : fitting;
    if (
      isNarrow !== this.isNarrow ||
      shown.length !== this.shown.length ||
      shown.some((each, index) => each !== this.shown[index])
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

  /** The rows in view; all rows of a short table. */
  private rowsInView(): IRowRange {
    const count = this.rows.length;
    const { scrollTop, clientHeight } = this.scroller;
    return count <= MAX_DRAWN_ROWS
      ? { first: 0, last: count }
      : visibleRows(count, ROW_HEIGHT, {
          top: scrollTop,
          height: clientHeight || DEFAULT_HEIGHT
        });
  }

  /** Draw the rows in view and some more; empty space replaces the others. */
  private draw(): void {
    const count = this.rows.length;
    const { first, last } = extendRange(this.rowsInView(), EXTRA_ROWS, count);
    this.drawn = { first, last };
    while (this.body.childElementCount > last - first) {
      this.body.lastElementChild?.remove();
    }
    while (this.body.childElementCount < last - first) {
      this.body.append(element('tr', { role: 'row' }));
    }
    // The head is a row, too.
    this.table.setAttribute('aria-rowcount', String(count + 1));
    const lines = [...this.body.children];
    for (let index = first; index < last; index++) {
      const row = this.rows[index];
      const line = lines[index - first];
      if (row !== undefined && line instanceof HTMLTableRowElement) {
        this.fill(line, row, index);
      }
    }
    this.setSpace('--jdt-rows-above', first);
    this.setSpace('--jdt-rows-below', count - last);
  }

  private setSpace(name: string, rows: number): void {
    this.body.style.setProperty(name, `${String(rows * ROW_HEIGHT)}px`);
  }

  private fill(line: HTMLTableRowElement, row: Row, index: number): void {
    line.id = `${this.id}-${String(index)}`;
    line.setAttribute('aria-rowindex', String(index + 2));
    if (row.kind === 'node') {
      this.fillNode(line, row);
    } else {
      this.fillRank(line, row);
    }
    line.classList.toggle('jdt-selected', index === this.selected);
  }

  private fillRank(line: HTMLTableRowElement, row: IRankRow): void {
    line.className = 'jdt-rank';
    line.dataset.state = row.rank.state;
    line.setAttribute('aria-level', this.order === 'rank' ? '2' : '1');
    line.removeAttribute('aria-expanded');
    line.title = this.describeRank(row.rank);
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

  /** All figures of a rank, including columns that are not shown. */
  private describeRank(rank: IRank): string {
    const figures = this.filled.map(
      column => `${column.title}: ${column.text(rank) ?? '–'}`
    );
    const hint = this.trans('show the log of rank %1', String(rank.rank));
    return [...(this.opensLogs ? [hint] : []), ...figures, rank.host].join(
      '\n'
    );
  }

  private fillNode(line: HTMLTableRowElement, row: INodeRow): void {
    line.className = 'jdt-node';
    delete line.dataset.state;
    line.setAttribute('aria-level', '1');
    line.setAttribute('aria-expanded', String(row.isExpanded));
    const { brief, details } = describeNode(row, this.isOneNode, this.trans);
    const hint = row.isExpanded
      ? this.trans('hide its ranks')
      : this.trans('show its ranks');
    line.title = [row.host, ...details, hint].join('\n');
    line.onclick = (): void => {
      this.activate(row);
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
    setText(inner, `${row.isExpanded ? '▾' : '▸'} ${row.host} · ${brief}`);
  }

  private onKey(event: KeyboardEvent): void {
    const action = keyAction(event.key, this.rows, this.selected);
    if (action === null) {
      return;
    }
    if (action.kind === 'select') {
      this.select(action.index);
    } else if (action.kind === 'expand') {
      this.setExpanded(action.host, action.isExpanded);
    } else {
      this.activate(action.row);
    }
    event.preventDefault();
    event.stopPropagation();
  }

  private setExpanded(host: string, isExpanded: boolean): void {
    if (isExpanded) {
      this.collapsed.delete(host);
    } else {
      this.collapsed.add(host);
    }
    this.onToggle();
  }

  private activate(row: Row): void {
    if (row.kind === 'node') {
      this.setExpanded(row.host, !row.isExpanded);
    } else if (this.opensLogs) {
      this.onRank(row.rank.rank);
    }
  }

  /** Select a row by keyboard and scroll to it. */
  private select(index: number): void {
    const row = this.rows[index];
    if (row === undefined) {
      return;
    }
    this.selected = index;
    this.selectedKey = rowKey(row);
    if (this.rows.length > MAX_DRAWN_ROWS) {
      // The row may not be drawn, so its position is calculated.
      const top = index * ROW_HEIGHT;
      const visible = this.scroller.clientHeight - ROW_HEIGHT; // below the head
      const lowest = top + ROW_HEIGHT - visible;
      this.scroller.scrollTop = Math.min(
        top,
        Math.max(this.scroller.scrollTop, lowest)
      );
    }
    this.draw();
    const line = this.body.querySelector('.jdt-selected');
    line?.scrollIntoView({ block: 'nearest' });
    this.table.setAttribute('aria-activedescendant', line?.id ?? '');
  }
}
