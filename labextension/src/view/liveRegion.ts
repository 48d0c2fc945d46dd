/**
 * A live region: text for screen readers that is not visible.
 */

import { Announcements } from './announcements';
import { element, setText } from './dom';

export class LiveRegion {
  readonly node = element('div', { role: 'status', class: 'jdt-live-region' });
  private readonly announcements = new Announcements(text => {
    setText(this.node, text);
  });

  /** Set the current text; called each time the view is drawn. */
  update(lines: string[]): void {
    this.announcements.update(lines);
  }

  destroy(): void {
    this.announcements.cancel();
  }
}
