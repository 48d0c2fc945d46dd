/**
 * Tabs over what ranks said: all of them merged, or one alone.
 *
 * Covers: reading the labels of the lines, the tabs, hiding other ranks'
 * figures.
 * Does not cover: merging, which the kernel does (notebook/transcript.py).
 *
 * The text is the same that every other front end shows; beside it stands
 * only which ranks there are and how wide the labels are.
 */

import type { INotebookTracker } from '@jupyterlab/notebook';
import { CodeCell } from '@jupyterlab/cells';
import { renderText } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { arrowKeys, element, markTab } from './view/dom';

export const RANKS_MIME = 'application/vnd.disttrain.ranks+json';

/** Past this many ranks tabs are too many: a list is chosen from. */
const MOST_TABS = 8;
const SELECT = 'jdt-select-rank';

/** How the labels in the text are to be read. */
interface IRanks {
  version: number;
  ranks: number[];
  width: number;
}

function isRanks(data: unknown): data is IRanks {
  return (
    isRecord(data) &&
    data.version === 1 &&
    Array.isArray(data.ranks) &&
    typeof data.width === 'number'
  );
}

function isRecord(data: unknown): data is Record<string, unknown> {
  return typeof data === 'object' && data !== null;
}

/** The ranks that a label names: "rank 1", "ranks 0,2-3". */
export function ranksOf(label: string): number[] {
  const list = label.replace(/^ranks? /, '').trim();
  if (!/^[\d,-]+$/.test(list)) {
    return [];
  }
  return list.split(',').flatMap(part => {
    const [first = 0, last = first] = part.split('-').map(Number);
    return Array.from({ length: last - first + 1 }, (_, at) => first + at);
  });
}

/**
 * The lines of one rank, without their labels.
 *
 * A line without a label belongs to the line above it; one that no label
 * column stands before, as a note below everything, belongs to all.
 */
export function linesOf(text: string, rank: number, width: number): string {
  const column = new RegExp(
    // Colour, label, then a bar: red and thick for stderr.
    `^(?:\\u001b\\[\\d+m)?(.{${String(width)}}) ((?:\\u001b\\[\\d*m)*[│┃](?:\\u001b\\[\\d*m)*) ?`
  );
  let isShown = true;
  const lines: string[] = [];
  for (const line of text.split('\n')) {
    const found = column.exec(line);
    if (found === null) {
      lines.push(line);
      continue;
    }
    const [head, label = '', bar = ''] = found;
    if (label.trim()) {
      isShown = ranksOf(label).includes(rank);
    }
    if (isShown) {
      lines.push(
        (bar.includes('┃') ? `${bar} ` : '') + line.slice(head.length)
      );
    }
  }
  return lines.join('\n');
}

/** Shows a display that several ranks said. */
export class RankOutput extends Widget implements IRenderMime.IRenderer {
  private readonly text = element('div', { class: 'jdt-ranks-text' });
  private tabs: HTMLElement | null = null;
  private ranks: number[] = [];
  private source = '';
  private width = 0;
  private chosen: number | null = null;
  private drawn: Promise<void> = Promise.resolve();

  constructor(
    private readonly options: IRenderMime.IRendererOptions,
    private readonly trans: TranslationBundle,
    private readonly onSelect: (node: HTMLElement, rank: number | null) => void
  ) {
    super();
    this.addClass('jp-RenderedText');
    this.addClass('jdt-ranks');
    this.node.appendChild(this.text);
    this.node.addEventListener(SELECT, event => {
      const rank: unknown = event instanceof CustomEvent ? event.detail : null;
      this.choose(typeof rank === 'number' ? rank : null);
    });
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const data: unknown = model.data[RANKS_MIME];
    const text = model.data['text/plain'];
    this.source = Array.isArray(text) ? text.join('') : '';
    if (typeof text === 'string') {
      this.source = text;
    }
    if (isRanks(data) && data.ranks.join() !== this.ranks.join()) {
      this.ranks = data.ranks;
      this.width = data.width;
      this.makeTabs();
    }
    await this.draw();
    if (this.chosen !== null) {
      this.onSelect(this.node, this.chosen); // figures may have come, too
    }
  }

  /** Do as the outputs do that the cell has put out before. */
  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    const area = this.node.closest('.jp-OutputArea');
    const other = area?.querySelector<HTMLElement>('[data-chosen]');
    if (other?.dataset.chosen !== undefined) {
      this.choose(Number(other.dataset.chosen));
    }
  }

  /** Draw once what was drawn before is there. */
  private draw(): Promise<void> {
    this.drawn = this.drawn.then(async () => {
      const { chosen, source, width } = this;
      const before = [...this.text.childNodes];
      await renderText({
        host: this.text, // to which it is added
        sanitizer: this.options.sanitizer,
        source: chosen === null ? source : linesOf(source, chosen, width)
      });
      before.forEach(node => {
        node.remove();
      });
    });
    return this.drawn;
  }

  private makeTabs(): void {
    this.tabs?.remove();
    this.tabs =
      this.ranks.length > MOST_TABS ? this.makeList() : this.makeTabBar();
    this.node.prepend(this.tabs);
  }

  private makeTabBar(): HTMLElement {
    const bar = element('div', {
      class: 'jdt-rank-tabs',
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
              ? this.trans.__('what all ranks said')
              : this.trans.__('what rank %1 said', rank)
        },
        rank === null ? this.trans.__('all') : String(rank)
      );
      markTab(tab, rank === this.chosen);
      tab.addEventListener('click', () => {
        this.select(rank);
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
      this.select(list.value === '' ? null : Number(list.value));
    });
    return element('div', { class: 'jdt-rank-tabs' }, list);
  }

  /** Choose a rank in all that the cell has put out. */
  private select(rank: number | null): void {
    const area = this.node.closest('.jp-OutputArea') ?? this.node;
    const others = area.querySelectorAll('.jdt-ranks');
    for (const each of others.length > 0 ? others : [this.node]) {
      each.dispatchEvent(new CustomEvent(SELECT, { detail: rank }));
    }
    this.onSelect(this.node, rank);
  }

  private choose(rank: number | null): void {
    if (rank === this.chosen) {
      return;
    }
    this.chosen = rank;
    this.toggleClass('jdt-one-rank', rank !== null);
    if (rank === null) {
      delete this.node.dataset.chosen;
    } else {
      this.node.dataset.chosen = String(rank);
    }
    for (const tab of this.node.querySelectorAll('[role=tab]')) {
      markTab(tab, tab.getAttribute('data-rank') === String(rank ?? ''));
    }
    const list = this.node.querySelector('select');
    if (list !== null) {
      list.value = String(rank ?? '');
    }
    void this.draw();
  }
}

/** Hide the figures of other ranks in the output that holds a node. */
export function hideOthers(
  tracker: INotebookTracker | null,
  node: HTMLElement,
  rank: number | null
): void {
  const panel = tracker?.find(each => each.node.contains(node));
  const cell = panel?.content.widgets.find(each => each.node.contains(node));
  if (!(cell instanceof CodeCell)) {
    return;
  }
  cell.outputArea.widgets.forEach((widget, at) => {
    const said: unknown = cell.outputArea.model.get(at).metadata.disttrain;
    if (isRecord(said) && Array.isArray(said.ranks)) {
      widget.setHidden(rank !== null && !said.ranks.includes(rank));
    }
  });
}

/** The factory for the registry of what can be shown. */
export function rankOutputs(
  tracker: INotebookTracker | null,
  trans: TranslationBundle
): IRenderMime.IRendererFactory {
  return {
    safe: true,
    mimeTypes: [RANKS_MIME],
    createRenderer: options =>
      new RankOutput(options, trans, (node, rank) => {
        hideOthers(tracker, node, rank);
      })
  };
}
