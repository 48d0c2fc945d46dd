/**
 * The end of one rank's log, read again and again while it is open.
 */

import { button, element, setText } from './dom';
import type { Translate } from './types';

const READ_MS = 2000;
/** The last characters of a log that are shown. */
const TAIL = 20_000;

export class RankLog {
  readonly node: HTMLElement;
  private readonly title = element('span');
  private readonly text = element('pre', { tabindex: '0' });
  private rank: number | null = null;
  private timer = 0;

  constructor(
    private readonly trans: Translate,
    private readonly read: (rank: number) => Promise<string>
  ) {
    const close = button('×', trans('close the log'), () => {
      this.close();
    });
    this.node = element(
      'section',
      { class: 'jdt-log', hidden: '' },
      element('header', {}, this.title, close),
      this.text
    );
  }

  open(rank: number): void {
    this.rank = rank;
    this.node.hidden = false;
    const title = this.trans('log of rank %1', String(rank));
    setText(this.title, title);
    this.node.setAttribute('aria-label', title);
    setText(this.text, '');
    void this.show();
    window.clearInterval(this.timer);
    this.timer = window.setInterval(() => {
      void this.show();
    }, READ_MS);
  }

  close(): void {
    window.clearInterval(this.timer);
    this.rank = null;
    this.node.hidden = true;
  }

  private async show(): Promise<void> {
    const { rank } = this;
    if (rank === null || document.hidden) {
      return;
    }
    let text: string;
    try {
      text = await this.read(rank);
    } catch (error) {
      text = error instanceof Error ? error.message : String(error);
    }
    if (rank !== this.rank) {
      return; // another was opened meanwhile
    }
    const { scrollHeight, scrollTop, clientHeight } = this.text;
    const atEnd = scrollHeight - scrollTop - clientHeight < 8;
    setText(
      this.text,
      text.slice(-TAIL) || this.trans('it has said nothing yet')
    );
    if (atEnd) {
      this.text.scrollTop = this.text.scrollHeight;
    }
  }
}
