/**
 * Tabs over what ranks printed: all of it merged, or one rank alone.
 *
 * Covers: the tabs of an output area, the lines of one rank, hiding other
 * ranks' figures, labels beside figures, folding long output.
 * Does not cover: merging, which the kernel does (notebook/transcript.py).
 *
 * The text is the same that every other front end shows; beside it stands
 * which ranks printed which line.
 */

import type { INotebookTracker } from '@jupyterlab/notebook';
import { CodeCell } from '@jupyterlab/cells';
import { renderText } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { element } from './view/dom';
import { RankChooser } from './chooser';
import { isRanks, lastLabel, linesOf, type IRanks } from './rank_lines';

export const RANKS_MIME = 'application/vnd.disttrain.ranks+json';

/** Longer output is folded to its first and last lines. */
const MOST_LINES = 600;
const FIRST_LINES = 300;
const LAST_LINES = 100;

type OnSelect = (node: HTMLElement, rank: number | null) => void;

/** What the outputs of one cell have in common: the rank, the fold. */
class Area {
  private static readonly areas = new WeakMap<HTMLElement, Area>();
  private readonly members = new Set<RankOutput>();
  private readonly chooser: RankChooser;
  private isOpen = false;
  private isDue = false;

  /** Return the area that an output is in. */
  static of(member: RankOutput, onSelect: OnSelect): Area {
    const node =
      member.node.closest<HTMLElement>('.jp-OutputArea') ?? member.node;
    const area = this.areas.get(node) ?? new Area(node, member.trans, onSelect);
    this.areas.set(node, area);
    return area;
  }

  private constructor(
    private readonly node: HTMLElement,
    trans: TranslationBundle,
    private readonly onSelect: OnSelect
  ) {
    this.chooser = new RankChooser(trans, () => {
      this.draw();
    });
  }

  get rank(): number | null {
    return this.chooser.chosen;
  }

  add(member: RankOutput): void {
    this.members.add(member);
    this.node.classList.add('jdt-rank-area');
    this.node.append(this.chooser.node); // below the text: it is read first
    this.update();
  }

  remove(member: RankOutput): void {
    this.members.delete(member);
    // What is cleared to be drawn again comes back before this is looked at.
    setTimeout(() => {
      if (this.members.size === 0) {
        this.chooser.node.remove();
        this.chooser.choose(null);
        this.isOpen = false;
        this.node.classList.remove('jdt-rank-area');
      }
    });
  }

  open(): void {
    this.isOpen = true;
    this.update();
  }

  /** Draw soon: several outputs often change together. */
  update(): void {
    if (this.isDue) {
      return;
    }
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  private draw(): void {
    const members = [...this.members].sort((one, other) =>
      one.node.compareDocumentPosition(other.node) &
      Node.DOCUMENT_POSITION_FOLLOWING
        ? -1
        : 1
    );
    const [first] = members;
    if (first === undefined) {
      return;
    }
    this.chooser.offer(
      first.ranks,
      members.map(member => member.panelId)
    );
    const counts = members.map(member => member.count(this.rank));
    const total = counts.reduce((sum, count) => sum + count, 0);
    const isFolded = !this.isOpen && total > MOST_LINES;
    let start = 0;
    members.forEach((member, at) => {
      const count = counts[at] ?? 0;
      const head = isFolded ? clamp(FIRST_LINES - start, count) : count;
      const tail = isFolded
        ? clamp(start + count - (total - LAST_LINES), count - head)
        : 0;
      const isHere =
        isFolded && start <= FIRST_LINES && start + count > FIRST_LINES;
      const hidden = isHere ? total - FIRST_LINES - LAST_LINES : 0;
      member.draw(this.rank, head, tail, hidden);
      start += count;
    });
    const width = Math.max(...members.map(member => member.labelWidth));
    this.node.style.setProperty('--jdt-label-width', String(width));
    this.onSelect(this.node, this.rank); // figures may have come, too
  }
}

function clamp(value: number, most: number): number {
  return Math.max(0, Math.min(value, most));
}

/** Shows lines that several ranks printed. */
export class RankOutput extends Widget implements IRenderMime.IRenderer {
  private static made = 0;
  readonly panelId = `jdt-rank-text-${String(RankOutput.made++)}`;
  ranks: number[] = [];
  /** Of the label at its end, which stands beside the figure below it. */
  labelWidth = 0;
  private readonly head = element('div', { class: 'jdt-ranks-text' });
  private readonly fold = element('button', {
    type: 'button',
    class: 'jdt-fold'
  });
  private readonly tail = element('div', { class: 'jdt-ranks-text' });
  private area: Area | null = null;
  private source = '';
  private whose: IRanks | null = null;
  private lines: { rank: number | null; lines: string[] } | null = null;
  private readonly drawnTexts = new Map<HTMLElement, string>();
  private drawn: Promise<void> = Promise.resolve();

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
      this.area?.open();
    });
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const data: unknown = model.data[RANKS_MIME];
    const text = model.data['text/plain'];
    this.source = Array.isArray(text) ? text.join('') : '';
    if (typeof text === 'string') {
      this.source = text;
    }
    this.whose = isRanks(data) ? data : null;
    this.ranks = this.whose?.ranks ?? [];
    this.labelWidth = lastLabel(this.source, this.whose);
    this.lines = null;
    if (this.area === null) {
      this.draw(null, Math.min(this.count(null), FIRST_LINES), 0, 0);
    } else {
      this.area.update();
    }
    await this.drawn;
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this.area = Area.of(this, this.onSelect);
    this.area.add(this);
  }

  protected override onBeforeDetach(message: Message): void {
    this.area?.remove(this);
    this.area = null;
    super.onBeforeDetach(message);
  }

  /** The number of lines, of all ranks or of one. */
  count(rank: number | null): number {
    return this.linesOf(rank).length;
  }

  /** Draw the first and the last lines; between them so many are folded. */
  draw(rank: number | null, head: number, tail: number, hidden: number): void {
    const lines = this.linesOf(rank);
    this.render(this.head, lines.slice(0, head).join('\n'));
    this.render(this.tail, tail > 0 ? lines.slice(-tail).join('\n') : '');
    this.fold.hidden = hidden === 0;
    this.fold.textContent = this.trans.__(
      '… %1 more lines; show them',
      hidden.toLocaleString('en')
    );
    this.toggleClass('jdt-empty', head + tail === 0 && hidden === 0);
    const endsWithLabel = rank === null && this.labelWidth > 0;
    const isEndDrawn = tail > 0 || head === lines.length;
    this.toggleClass('jdt-beside', endsWithLabel && isEndDrawn);
  }

  private linesOf(rank: number | null): string[] {
    let known = this.lines;
    if (known?.rank !== rank) {
      known = { rank, lines: linesOf(this.source, this.whose, rank) };
      this.lines = known;
    }
    return known.lines;
  }

  /** Draw a text once what was drawn before is there. */
  private render(host: HTMLElement, source: string): void {
    if (this.drawnTexts.get(host) === source) {
      return;
    }
    this.drawnTexts.set(host, source);
    this.drawn = this.drawn.then(async () => {
      const before = [...host.childNodes];
      if (source !== '') {
        await renderText({
          host, // to which it is added
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
    const told: unknown = cell.outputArea.model.get(at).metadata.disttrain;
    if (isRecord(told) && Array.isArray(told.ranks)) {
      widget.setHidden(rank !== null && !told.ranks.includes(rank));
    }
  });
}

function isRecord(data: unknown): data is Record<string, unknown> {
  return typeof data === 'object' && data !== null;
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
