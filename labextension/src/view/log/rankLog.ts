/**
 * The end of a rank's log, or of all logs, read periodically while it is open.
 *
 * Covers: drawing, copying, downloading, links to the whole file.
 * Does not cover: which lines are shown (logLines).
 */

import { messageOf } from '../../protocol/messages';
import type {
  IActions,
  ILog,
  LogSelection,
  Translate
} from '../../protocol/types';
import { button, download, element, setText } from '../dom';
import { findLines, MAX_LINES, noteOf, splitMatches } from './logLines';
import type { ILine } from './terminal';

const READ_INTERVAL_MS = 2000;
/** So near to its end, in px, the text follows new lines. */
const FOLLOW_PX = 8;

export class RankLog {
  readonly node: HTMLElement;
  private readonly title = element('span', { class: 'jdt-log-title' });
  private readonly note = element('span', { class: 'jdt-muted' });
  private readonly text = element('pre', {
    tabindex: '0',
    'data-lm-suppress-shortcuts': 'true'
  });
  private readonly search: HTMLInputElement;
  private readonly file: HTMLElement;
  private clusterId = '';
  private selection: LogSelection | null = null;
  private logs: ILog[] = [];
  private drawn = '';
  private timer = 0;

  constructor(
    private readonly trans: Translate,
    private readonly actions: Pick<IActions, 'log' | 'logUrl'>
  ) {
    this.search = element('input', {
      type: 'search',
      placeholder: trans('search'),
      'aria-label': trans('show only lines with this text')
    });
    this.search.addEventListener('input', () => {
      this.draw();
    });
    this.file = element('span', { class: 'jdt-files' });
    const copy = button(trans('Copy'), trans('copy these lines'), () => {
      void this.copy();
    });
    const all = button(
      trans('All ranks'),
      trans('show the logs of all ranks'),
      () => {
        this.open(this.clusterId, 'all');
      }
    );
    const close = button('×', trans('close the log'), () => {
      this.close();
    });
    this.node = element(
      'section',
      { class: 'jdt-log', hidden: '' },
      element('header', {}, this.title, this.note, close),
      element(
        'div',
        { class: 'jdt-controls' },
        this.search,
        all,
        copy,
        this.file
      ),
      this.text
    );
  }

  open(clusterId: string, selection: LogSelection): void {
    this.clusterId = clusterId;
    this.selection = selection;
    this.logs = [];
    this.node.hidden = false;
    const title =
      selection === 'all'
        ? this.trans('logs of all ranks')
        : this.trans('log of rank %1', String(selection));
    setText(this.title, title);
    this.node.setAttribute('aria-label', title);
    this.text.replaceChildren();
    this.drawn = '';
    this.file.replaceChildren(...this.fileLinks(selection));
    void this.read();
    window.clearInterval(this.timer);
    this.timer = window.setInterval(() => {
      void this.read();
    }, READ_INTERVAL_MS);
  }

  close(): void {
    window.clearInterval(this.timer);
    this.selection = null;
    this.node.hidden = true;
  }

  /** Links to the whole file; without a server, a download of these lines. */
  private fileLinks(selection: LogSelection): HTMLElement[] {
    const url =
      selection === 'all'
        ? null
        : this.actions.logUrl(this.clusterId, selection);
    const label = this.trans('Download');
    const rankFile = `rank${String(selection)}.log`;
    if (url === null) {
      const name = selection === 'all' ? 'ranks.log' : rankFile;
      const title = this.trans('download these lines');
      return [
        button(label, title, () => {
          download(name, `${this.shownText()}\n`);
        })
      ];
    }
    const link = { class: 'jdt-button', href: url };
    return [
      element('a', { ...link, target: '_blank' }, this.trans('Open')),
      element('a', { ...link, download: rankFile }, label)
    ];
  }

  private async copy(): Promise<void> {
    let note: string;
    try {
      await navigator.clipboard.writeText(this.shownText());
      note = this.trans('copied');
    } catch (error) {
      note = this.trans(
        'the browser does not allow this page to copy (%1); select the text instead',
        messageOf(error)
      );
    }
    setText(this.note, note);
  }

  private shownLines(): ILine[] {
    return findLines(this.logs, this.selection, this.search.value);
  }

  private shownText(): string {
    return this.shownLines()
      .map(line => line.text)
      .join('\n');
  }

  private async read(): Promise<void> {
    const { selection } = this;
    if (selection === null || document.hidden) {
      return;
    }
    let failure = '';
    let logs = this.logs;
    try {
      logs = await this.actions.log(this.clusterId, selection);
    } catch (error) {
      failure = messageOf(error);
    }
    if (selection === this.selection) {
      this.logs = logs;
      this.draw(failure);
    }
  }

  private draw(failure = ''): void {
    const search = this.search.value;
    const found = this.shownLines();
    const lines = found.slice(-MAX_LINES);
    const note = noteOf(this.logs, found.length, search, this.trans);
    setText(this.note, failure || note);
    const key = JSON.stringify([lines, search]);
    if (key === this.drawn) {
      return; // drawing again would clear a selection of the user
    }
    this.drawn = key;
    const { scrollHeight, scrollTop, clientHeight } = this.text;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < FOLLOW_PX;
    this.text.replaceChildren(...lines.map(line => lineNode(line, search)));
    if (isAtEnd) {
      this.text.scrollTop = this.text.scrollHeight;
    }
  }
}

function lineNode(line: ILine, search: string): HTMLElement {
  return element(
    'span',
    line.isError ? { class: 'jdt-stderr', title: 'stderr' } : {},
    ...splitMatches(line.text, search).map(({ text, isMatch }) =>
      isMatch ? element('mark', {}, text) : text
    ),
    '\n'
  );
}
