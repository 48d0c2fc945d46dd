/**
 * Tabs above the output of ranks: all of it merged, or that of one rank.
 *
 * Covers: the tabs of an output area, hiding figures of other ranks, labels
 * beside figures, folding long output.
 * Does not cover: merging, which the kernel does (notebook/output/transcript.py), which
 * lines are a rank's (rankLines).
 *
 * The text is the one that every other front end shows; data in the same output
 * maps its lines to ranks.
 */

import { CodeCell } from '@jupyterlab/cells';
import type { INotebookTracker } from '@jupyterlab/notebook';
import { renderText } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { isRecord } from '../protocol/messages';
import { element } from '../view/dom';
import { formatCount } from '../view/format';
import { FIRST_LINES, foldParts, type IFoldedPart } from './fold';
import {
  type IRankOutput,
  isRankOutput,
  selectLines,
  trailingLabelWidth
} from './rankLines';
import { RankSelector } from './rankSelector';

const RANKS_MIME = 'application/vnd.disttrain.ranks+json';

type OnSelect = (node: HTMLElement, rank: number | null) => void;

/** The state that all outputs of one cell share: selected rank and folding. */
class RankOutputArea {
  private static readonly areas = new WeakMap<HTMLElement, RankOutputArea>();
  private readonly outputs = new Set<RankOutput>();
  private readonly selector: RankSelector;
  private isOpen = false;
  private isDrawScheduled = false;

  /** Return the area that contains an output. */
  static of(output: RankOutput, onSelect: OnSelect): RankOutputArea {
    const node =
      output.node.closest<HTMLElement>('.jp-OutputArea') ?? output.node;
    const area =
      this.areas.get(node) ?? new RankOutputArea(node, output.trans, onSelect);
    this.areas.set(node, area);
    return area;
  }

  private constructor(
    private readonly node: HTMLElement,
    trans: TranslationBundle,
    private readonly onSelect: OnSelect
  ) {
    this.selector = new RankSelector(trans, () => {
      this.draw();
    });
  }

  add(output: RankOutput): void {
    this.outputs.add(output);
    this.node.classList.add('jdt-rank-area');
    // After the text, which screen readers then read first.
    this.node.append(this.selector.node);
    this.scheduleDraw();
  }

  remove(output: RankOutput): void {
    this.outputs.delete(output);
    // Output that is replaced by new output is added again before this runs.
    setTimeout(() => {
      if (this.outputs.size === 0) {
        this.selector.node.remove();
        this.selector.select(null);
        this.isOpen = false;
        this.node.classList.remove('jdt-rank-area');
      }
    });
  }

  /** Show the lines that are folded. */
  unfold(): void {
    this.isOpen = true;
    this.scheduleDraw();
  }

  /** Draw in the next frame, as several outputs often change together. */
  scheduleDraw(): void {
    if (this.isDrawScheduled) {
      return;
    }
    this.isDrawScheduled = true;
    requestAnimationFrame(() => {
      this.isDrawScheduled = false;
      this.draw();
    });
  }

  private draw(): void {
    const outputs = [...this.outputs].sort((one, other) =>
      one.node.compareDocumentPosition(other.node) &
      Node.DOCUMENT_POSITION_FOLLOWING
        ? -1
        : 1
    );
    const [first] = outputs;
    if (first === undefined) {
      return;
    }
    this.selector.update(
      first.ranks,
      outputs.map(output => output.panelId)
    );
    const rank = this.selector.selected;
    const counts = outputs.map(output => output.count(rank));
    foldParts(counts, this.isOpen).forEach((part, index) => {
      outputs[index]?.draw(rank, part);
    });
    const width = Math.max(...outputs.map(output => output.labelWidth));
    this.node.style.setProperty('--jdt-label-width', String(width));
    this.onSelect(this.node, rank); // there may be new figures
  }
}

/** Renders lines that several ranks printed. */
class RankOutput extends Widget implements IRenderMime.IRenderer {
  private static count = 0;
  readonly panelId = `jdt-rank-text-${String(RankOutput.count++)}`;
  ranks: number[] = [];
  /** The width of the label at its end, which is beside the next figure. */
  labelWidth = 0;
  private readonly head = element('div', { class: 'jdt-ranks-text' });
  private readonly fold = element('button', {
    type: 'button',
    class: 'jdt-fold'
  });
  private readonly tail = element('div', { class: 'jdt-ranks-text' });
  private area: RankOutputArea | null = null;
  private source = '';
  private output: IRankOutput | null = null;
  private selection: { rank: number | null; lines: string[] } | null = null;
  private readonly rendered = new Map<HTMLElement, string>();
  private rendering: Promise<void> = Promise.resolve();

  constructor(
    private readonly options: IRenderMime.IRendererOptions,
    readonly trans: TranslationBundle,
    private readonly onSelect: OnSelect
  ) {
    super();
    this.addClass('jp-RenderedText');
    this.addClass('jdt-ranks');
    this.node.append(this.head, this.fold, this.tail);
    this.node.id = this.panelId;
    this.node.setAttribute('role', 'tabpanel');
    this.fold.hidden = true;
    this.fold.addEventListener('click', () => {
      this.area?.unfold();
    });
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const data: unknown = model.data[RANKS_MIME];
    const text = model.data['text/plain'];
    this.source = Array.isArray(text) ? text.join('') : '';
    if (typeof text === 'string') {
      this.source = text;
    }
    this.output = isRankOutput(data) ? data : null;
    this.ranks = this.output?.ranks ?? [];
    this.labelWidth = trailingLabelWidth(this.source, this.output);
    this.selection = null;
    if (this.area === null) {
      const head = Math.min(this.count(null), FIRST_LINES);
      this.draw(null, { head, tail: 0, hidden: 0 });
    } else {
      this.area.scheduleDraw();
    }
    await this.rendering;
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this.area = RankOutputArea.of(this, this.onSelect);
    this.area.add(this);
  }

  protected override onBeforeDetach(message: Message): void {
    this.area?.remove(this);
    this.area = null;
    super.onBeforeDetach(message);
  }

  /** The number of lines of all ranks, or of one. */
  count(rank: number | null): number {
    return this.linesOf(rank).length;
  }

  draw(rank: number | null, { head, tail, hidden }: IFoldedPart): void {
    const lines = this.linesOf(rank);
    this.render(this.head, lines.slice(0, head).join('\n'));
    this.render(this.tail, tail > 0 ? lines.slice(-tail).join('\n') : '');
    this.fold.hidden = hidden === 0;
    this.fold.textContent = this.trans.__(
      '… %1 more lines; show them',
      formatCount(hidden)
    );
    this.toggleClass('jdt-no-lines', head + tail === 0 && hidden === 0);
    const endsWithLabel = rank === null && this.labelWidth > 0;
    const isEndDrawn = tail > 0 || head === lines.length;
    this.toggleClass('jdt-figure-label', endsWithLabel && isEndDrawn);
  }

  private linesOf(rank: number | null): string[] {
    let selection = this.selection;
    if (selection?.rank !== rank) {
      const lines = selectLines(this.source, this.output, rank);
      selection = { rank, lines };
      this.selection = selection;
    }
    return selection.lines;
  }

  /** Render a text after those that are being rendered. */
  private render(host: HTMLElement, source: string): void {
    if (this.rendered.get(host) === source) {
      return;
    }
    this.rendered.set(host, source);
    this.rendering = this.rendering.then(async () => {
      const before = [...host.childNodes];
      if (source !== '') {
        await renderText({
          host, // appends to it
          sanitizer: this.options.sanitizer,
          source
        });
      }
      before.forEach(node => {
        node.remove();
      });
    });
  }
}

/** Hide figures of other ranks in the output area that is a node. */
function hideOtherFigures(
  tracker: INotebookTracker | null,
  node: HTMLElement,
  rank: number | null
): void {
  const panel = tracker?.find(each => each.node.contains(node));
  const cell = panel?.content.widgets.find(each => each.node.contains(node));
  if (!(cell instanceof CodeCell)) {
    return;
  }
  // The input line of an open question comes after the outputs, and is none.
  const { model, widgets } = cell.outputArea;
  widgets.slice(0, model.length).forEach((widget, index) => {
    const { metadata } = model.get(index);
    const owner: unknown = metadata.disttrain;
    if (isRecord(owner) && Array.isArray(owner.ranks)) {
      widget.setHidden(rank !== null && !owner.ranks.includes(rank));
    }
  });
}

/** Make the factory for JupyterLab's registry of renderers. */
export function rankOutputFactory(
  tracker: INotebookTracker | null,
  trans: TranslationBundle
): IRenderMime.IRendererFactory {
  return {
    safe: true,
    mimeTypes: [RANKS_MIME],
    createRenderer: options =>
      new RankOutput(options, trans, (node, rank) => {
        hideOtherFigures(tracker, node, rank);
      })
  };
}
