/**
 * The variables of the ranks, read when it is opened and when a cell has ended.
 *
 * Covers: drawing, the search, the order, the button that opens it.
 * Does not cover: which rows are shown (variableRows), when they are read again
 * (refresh).
 */

import { messageOf } from '../../protocol/messages';
import type {
  ICluster,
  IVariable,
  IVariables,
  Translate
} from '../../protocol/types';
import { button, element, setText } from '../dom';
import { formatSize } from '../format';
import { CellEnds, Repeater } from './refresh';
import {
  describeEmpty,
  describeSilent,
  findVariables,
  formatRanks,
  type IVariableOrder,
  MAX_ROWS,
  nextOrder,
  type SortColumn,
  sortState,
  summarizeVariables
} from './variableRows';

let viewCount = 0;

export class VariablesView {
  readonly node: HTMLElement;
  /** Opens and closes the view; for a toolbar. */
  readonly button: HTMLButtonElement;
  private readonly search: HTMLInputElement;
  private readonly heads: ReadonlyMap<SortColumn, HTMLElement>;
  private readonly body = element('tbody');
  private readonly scroller: HTMLElement;
  private readonly empty = element('div', { class: 'jdt-muted' });
  private readonly silent = element('div', { class: 'jdt-silent' });
  private readonly error = element('div', {
    role: 'alert',
    class: 'jdt-error'
  });
  private readonly total: HTMLElement;
  private readonly cellEnds = new CellEnds();
  private readonly reads = new Repeater(() => this.read());
  private clusterId = '';
  private content: IVariables | null = null;
  private order: IVariableOrder = { column: 'name', isDescending: false };
  private drawn = '';

  constructor(
    private readonly trans: Translate,
    private readonly readVariables: (clusterId: string) => Promise<IVariables>
  ) {
    const id = `jdt-variables-${String(++viewCount)}`;
    this.button = button(
      trans('Variables'),
      trans('show the variables of the ranks'),
      () => {
        this.toggle();
      }
    );
    this.button.setAttribute('aria-controls', id);
    this.search = this.makeSearch();
    this.heads = new Map([
      ['name', this.makeSortHead('name', trans('Name'))],
      ['size', this.makeSortHead('size', trans('Size'))]
    ]);
    this.scroller = this.makeTable();
    this.total = element('footer', {
      class: 'jdt-muted',
      role: 'status',
      title: trans(
        'tensors and arrays of all variables of a rank; one that several variables hold is counted once'
      )
    });
    this.node = this.makeNode(id);
    this.close();
  }

  private makeSearch(): HTMLInputElement {
    const made = element('input', {
      type: 'search',
      placeholder: this.trans('search'),
      'aria-label': this.trans(
        'show only variables with this text in their names'
      )
    });
    made.addEventListener('input', () => {
      this.draw();
    });
    return made;
  }

  private makeNode(id: string): HTMLElement {
    const t = this.trans;
    const refresh = button(t('Refresh'), t('read the variables again'), () => {
      void this.reads.request();
    });
    const close = button('×', t('close the variables'), () => {
      this.close();
      this.button.focus();
    });
    const title = element('span', { class: 'jdt-log-title' }, t('variables'));
    return element(
      'section',
      { class: 'jdt-variables', id, 'aria-label': t('variables') },
      element('header', {}, title, close),
      element('div', { class: 'jdt-controls' }, this.search, refresh),
      this.error,
      this.silent,
      this.empty,
      this.scroller,
      this.total
    );
  }

  private makeTable(): HTMLElement {
    const t = this.trans;
    const titles = [
      this.heads.get('name'),
      element('th', { scope: 'col', class: 'jdt-ranks' }, t('Ranks')),
      element('th', { scope: 'col' }, t('Value')),
      this.heads.get('size'),
      element('th', { scope: 'col' }, t('Type'))
    ].filter(each => each !== undefined);
    const table = element(
      'table',
      {
        class: 'jdt-variable-table',
        tabindex: '0', // so that arrow keys scroll it
        'data-lm-suppress-shortcuts': 'true',
        'aria-label': t('variables')
      },
      element('thead', {}, element('tr', {}, ...titles)),
      this.body
    );
    return element('div', { class: 'jdt-variable-scroller' }, table);
  }

  private makeSortHead(column: SortColumn, title: string): HTMLElement {
    const sort = button(title, this.trans('sort'), () => {
      this.order = nextOrder(this.order, column);
      this.draw();
    });
    sort.classList.add('jdt-sort');
    const side = column === 'size' ? { class: 'right' } : {};
    return element('th', { scope: 'col', ...side }, sort);
  }

  private toggle(): void {
    if (this.node.hidden) {
      this.node.hidden = false;
      this.button.setAttribute('aria-expanded', 'true');
      this.draw();
      void this.reads.request();
      this.node.scrollIntoView({ block: 'nearest' });
    } else {
      this.close();
    }
  }

  close(): void {
    this.reads.cancel();
    this.node.hidden = true;
    this.button.setAttribute('aria-expanded', 'false');
  }

  /** Read the variables again if a cell has ended, or the ranks were replaced. */
  show(cluster: ICluster): void {
    const isOther = cluster.id !== this.clusterId;
    if (isOther) {
      this.clusterId = cluster.id;
      this.content = null;
      showLine(this.error, '');
      this.draw();
    }
    const hasEnded = this.cellEnds.check(cluster.ranks);
    if ((hasEnded || isOther) && !this.node.hidden) {
      void this.reads.request();
    }
  }

  private async read(): Promise<void> {
    const id = this.clusterId;
    let { content } = this;
    let failure = '';
    this.node.setAttribute('aria-busy', 'true');
    try {
      content = await this.readVariables(id);
    } catch (error) {
      failure = messageOf(error);
    }
    this.node.setAttribute('aria-busy', 'false');
    if (id === this.clusterId && !this.node.hidden) {
      this.content = content;
      showLine(this.error, failure);
      this.draw();
    }
  }

  private draw(): void {
    const { content, trans } = this;
    const found = findVariables(
      content?.variables ?? [],
      this.search.value,
      this.order
    );
    for (const [column, head] of this.heads) {
      head.setAttribute('aria-sort', sortState(this.order, column));
    }
    if (content === null) {
      const isFailed = !this.error.hidden;
      showLine(this.silent, '');
      showLine(this.empty, isFailed ? '' : trans('the ranks are asked'));
      showLine(this.total, '');
    } else {
      showLine(this.silent, describeSilent(content.silent, trans));
      showLine(this.empty, describeEmpty(content, found, trans));
      showLine(this.total, summarizeVariables(content, found, trans));
    }
    this.scroller.hidden = found.length === 0;
    // A narrow panel has no room for a column without a text.
    const differ = found.some(each => each.differs);
    this.scroller.classList.toggle('jdt-all-equal', !differ);
    this.drawRows(found.slice(0, MAX_ROWS));
  }

  private drawRows(variables: IVariable[]): void {
    const key = JSON.stringify(variables);
    if (key !== this.drawn) {
      this.drawn = key; // drawing again would clear a selection of the user
      this.body.replaceChildren(...variables.map(each => this.makeRow(each)));
    }
  }

  private makeRow(variable: IVariable): HTMLElement {
    const { name, type, value, size_bytes: size, differs } = variable;
    return element(
      'tr',
      differs
        ? { class: 'jdt-differs', title: this.trans('differs between ranks') }
        : {},
      element('th', { scope: 'row', title: name }, name),
      element('td', { class: 'jdt-ranks' }, formatRanks(variable, this.trans)),
      element('td', { title: value }, value),
      element('td', { class: 'right' }, size === null ? '' : formatSize(size)),
      element('td', { title: type }, type)
    );
  }
}

function showLine(node: HTMLElement, text: string): void {
  setText(node, text);
  node.hidden = !text;
}
