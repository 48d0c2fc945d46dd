/**
 * Decide what a screen reader announces, and when.
 *
 * The view changes several times a second. An announcement follows a change of
 * the text, not of figures in it, and is delayed so that it has the latest text.
 */

const DELAY_MS = 1000;
/** Line numbers and durations: they change while the message is the same. */
const FIGURES = /(?<=line )\d+|[\d.,]+(?= (?:s|ms|min|h|%))/g;

export class Announcements {
  private latest = '';
  private announced = '';
  private timer: ReturnType<typeof setTimeout> | undefined;

  /**
   * @param publish - called with the text to announce
   */
  constructor(private readonly publish: (text: string) => void) {}

  /** Set the current text; called each time the view is drawn. */
  update(lines: string[]): void {
    this.latest = lines.join('\n');
    if (withoutFigures(this.latest) === this.announced) {
      this.cancel();
    } else {
      this.timer ??= setTimeout(() => {
        this.timer = undefined;
        this.announced = withoutFigures(this.latest);
        this.publish(this.latest);
      }, DELAY_MS);
    }
  }

  /** Drop an announcement that is due. */
  cancel(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
  }
}

function withoutFigures(text: string): string {
  return text.replace(FIGURES, '');
}
