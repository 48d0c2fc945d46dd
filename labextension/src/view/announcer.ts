/**
 * What a screen reader says of a cluster.
 *
 * The view changes twice a second, and nobody could listen to that: read
 * aloud is what has changed in kind and has stayed so for a moment.
 */

import { element, setText } from './dom';

const STAYS_MS = 1000;
/** Figures that go on changing while what is said stays the same. */
const FIGURES = /[\d.,]+(?= (?:s|ms|min|h|%))/g;

export class Announcer {
  readonly node = element('div', { role: 'status', class: 'jdt-said' });
  private said = '';
  private kind = '';
  private since = 0;

  /** Take what there is to say now; called whenever the view is drawn. */
  take(lines: string[], now = performance.now()): void {
    const text = lines.join('\n');
    const kind = text.replace(FIGURES, '');
    if (kind !== this.kind) {
      this.kind = kind;
      this.since = now;
    } else if (kind !== this.said && now - this.since >= STAYS_MS) {
      this.said = kind;
      setText(this.node, text);
    }
  }
}
