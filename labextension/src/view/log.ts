/**
 * The end of a rank's log, or of all, read again and again while it is open.
 *
 * Covers: what is shown of it, searching, copying, the whole file.
 * Does not cover: what a terminal would show (terminal).
 */

import { button, download, element, setText } from './dom';
import { type ILine, linesOf } from './terminal';
import type { IActions, ILog, LogOf, Translate } from './types';

const READ_MS = 2000;
/** Lines of a log that are drawn. */
const MOST_LINES = 2000;

export class RankLog {
  readonly node: HTMLElement;
  private readonly title = element('span', { class: 'jdt-log-title' });
  private readonly note = element('span', { class: 'jdt-quiet' });
  private readonly text = element('pre', {
    tabindex: '0',
    'data-lm-suppress-shortcuts': 'true'
  });
  private readonly search: HTMLInputElement;
  private readonly file: HTMLElement;
  private clusterId = '';
  private of: LogOf | null = null;
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

  open(clusterId: string, of: LogOf): void {
    this.clusterId = clusterId;
    this.of = of;
    this.logs = [];
    this.node.hidden = false;
    const title =
      of === 'all'
        ? this.trans('logs of all ranks')
        : this.trans('log of rank %1', String(of));
    setText(this.title, title);
    this.node.setAttribute('aria-label', title);
    this.text.replaceChildren();
    this.drawn = '';
    this.file.replaceChildren(...this.links(of));
    void this.read();
    window.clearInterval(this.timer);
    this.timer = window.setInterval(() => {
      void this.read();
    }, READ_MS);
  }

  close(): void {
    window.clearInterval(this.timer);
    this.of = null;
    this.node.hidden = true;
  }

  /** Where there is a server, the whole file; else what is shown. */
  private links(of: LogOf): HTMLElement[] {
    const url = of === 'all' ? null : this.actions.logUrl(this.clusterId, of);
    const save = this.trans('Download');
    if (url === null) {
      const name = of === 'all' ? 'ranks.log' : `rank${String(of)}.log`;
      const title = this.trans('download these lines');
      return [
        button(save, title, () => {
          download(name, `${this.words()}\n`);
        })
      ];
    }
    const link = { class: 'jdt-button', href: url };
    return [
      element('a', { ...link, target: '_blank' }, this.trans('Open')),
      element('a', { ...link, download: `rank${String(of)}.log` }, save)
    ];
  }

  private async copy(): Promise<void> {
    let told: string;
    try {
      await navigator.clipboard.writeText(this.words());
      told = this.trans('copied');
    } catch (error) {
      told = this.trans(
        'the browser does not let this page copy (%1); select the text instead',
        error instanceof Error ? error.message : String(error)
      );
    }
    setText(this.note, told);
  }

  private words(): string {
    return this.lines()
      .map(line => line.text)
      .join('\n');
  }

  /** The lines that are to be seen. */
  private lines(): ILine[] {
    const wanted = this.search.value.toLowerCase();
    const width = Math.max(...this.logs.map(log => String(log.rank).length));
    return this.logs
      .flatMap(log => {
        const lines = linesOf(log.parts);
        return this.of === 'all'
          ? lines.map(({ text, isError }) => ({
              text: `${String(log.rank).padStart(width)} │ ${text}`,
              isError
            }))
          : lines;
      })
      .filter(line => line.text.toLowerCase().includes(wanted));
  }

  private async read(): Promise<void> {
    const { of } = this;
    if (of === null || document.hidden) {
      return;
    }
    let trouble = '';
    let logs = this.logs;
    try {
      logs = await this.actions.log(this.clusterId, of);
    } catch (error) {
      trouble = error instanceof Error ? error.message : String(error);
    }
    if (of === this.of) {
      this.logs = logs;
      this.draw(trouble);
    }
  }

  private draw(trouble = ''): void {
    const found = this.lines();
    const lines = found.slice(-MOST_LINES);
    const key = JSON.stringify([lines, this.search.value]);
    setText(this.note, trouble || this.counted(found.length));
    if (key === this.drawn) {
      return; // a selection stays
    }
    this.drawn = key;
    const { scrollHeight, scrollTop, clientHeight } = this.text;
    const atEnd = scrollHeight - scrollTop - clientHeight < 8;
    this.text.replaceChildren(
      ...lines.map(line =>
        element(
          'span',
          line.isError ? { class: 'jdt-stderr', title: 'stderr' } : {},
          ...marked(`${line.text}\n`, this.search.value)
        )
      )
    );
    if (atEnd) {
      this.text.scrollTop = this.text.scrollHeight;
    }
  }

  /** What there is to say of the lines. */
  private counted(count: number): string {
    if (this.search.value) {
      return this.trans('%1 lines', String(count));
    }
    if (count === 0) {
      return this.trans('no output yet');
    }
    return this.logs.some(log => log.is_cut) || count > MOST_LINES
      ? this.trans('the end of it')
      : '';
  }
}

/** A text with what was searched for marked. */
function marked(text: string, wanted: string): (string | HTMLElement)[] {
  if (!wanted) {
    return [text];
  }
  const parts: (string | HTMLElement)[] = [];
  const lower = text.toLowerCase();
  const word = wanted.toLowerCase();
  let from = 0;
  for (
    let at = lower.indexOf(word);
    at !== -1;
    at = lower.indexOf(word, from)
  ) {
    const end = at + word.length;
    parts.push(text.slice(from, at), element('mark', {}, text.slice(at, end)));
    from = end;
  }
  return [...parts, text.slice(from)];
}
