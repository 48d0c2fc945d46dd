/**
 * What a screen reader says of a cluster.
 *
 * The view changes twice a second, and nobody could listen to that: what has
 * changed in kind is read aloud a moment later, as it is then.
 */

import { element, setText } from './dom';

const PAUSE_MS = 1000;
/** Figures that go on changing while what is said stays the same. */
const FIGURES = /(?<=line )\d+|[\d.,]+(?= (?:s|ms|min|h|%))/g;

export class Announcer {
  readonly node = element('div', { role: 'status', class: 'jdt-said' });
  private now = '';
  private said = '';
  private timer = 0;

  /** Take what there is to say now; called whenever the view is drawn. */
  take(lines: string[]): void {
    this.now = lines.join('\n');
    if (kindOf(this.now) === this.said) {
      this.destroy();
    } else if (this.timer === 0) {
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        this.said = kindOf(this.now);
        setText(this.node, this.now);
      }, PAUSE_MS);
    }
  }

  /** Say nothing any more. */
  destroy(): void {
    window.clearTimeout(this.timer);
    this.timer = 0;
  }
}

function kindOf(text: string): string {
  return text.replace(FIGURES, '');
}
