/**
 * Decide when variables are read again.
 *
 * Does not cover: reading them, DOM (variablesView).
 */

import type { IRank } from '../../protocol/types';
import { runsCell } from '../summary';

/** Notices that cells have ended since the last check. */
export class CellEnds {
  private wasRunning = false;
  private uses = '';

  /**
   * Whether a cell has ended and none runs. A short cell is never seen to run,
   * and is noticed by the number of uses.
   */
  check(ranks: IRank[]): boolean {
    if (runsCell(ranks)) {
      this.wasRunning = true;
      return false;
    }
    const uses = ranks.map(rank => rank.uses ?? 0).join();
    const hasEnded =
      this.wasRunning || (this.uses !== '' && uses !== this.uses);
    this.wasRunning = false;
    this.uses = uses;
    return hasEnded;
  }
}

/** Calls a function once at a time; calls that are requested meanwhile are one. */
export class Repeater {
  private isRunning = false;
  private isRequested = false;

  constructor(private readonly call: () => Promise<void>) {}

  /** Resolves once no call is pending. */
  async request(): Promise<void> {
    this.isRequested = true;
    if (this.isRunning) {
      return;
    }
    this.isRunning = true;
    try {
      while (this.takeRequest()) {
        await this.call();
      }
    } finally {
      this.isRunning = false;
    }
  }

  /** Drop a request that has not begun. */
  cancel(): void {
    this.isRequested = false;
  }

  private takeRequest(): boolean {
    const isRequested = this.isRequested;
    this.isRequested = false;
    return isRequested;
  }
}
