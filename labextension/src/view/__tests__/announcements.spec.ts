import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { Announcements } from '../announcements';

const LONG_MS = 60_000;

describe('Announcements', () => {
  let published: string[];
  let announcements: Announcements;

  beforeEach(() => {
    vi.useFakeTimers();
    published = [];
    announcements = new Announcements(text => published.push(text));
  });
  afterEach(() => {
    vi.useRealTimers();
  });

  /** Set lines and let all timers run. */
  function settle(...lines: string[]): void {
    announcements.update(lines);
    vi.advanceTimersByTime(LONG_MS);
  }

  it('publishes a change once, with the latest text', () => {
    announcements.update(['no cell runs']);
    announcements.update(['the ranks run a cell']);
    expect(published).toEqual([]);
    vi.advanceTimersByTime(LONG_MS);
    expect(published).toEqual(['the ranks run a cell']);
  });

  it('does not repeat a text', () => {
    settle('no cell runs');
    settle('no cell runs');
    expect(published).toEqual(['no cell runs']);
  });

  it('ignores changes of line numbers and durations', () => {
    settle('rank 1 waits at line 12 for 3 s', '16 of 60');
    settle('rank 1 waits at line 13 for 40.5 s', '16 of 60');
    expect(published).toEqual(['rank 1 waits at line 12 for 3 s\n16 of 60']);
  });

  it('publishes changes of other numbers, and of the unit', () => {
    settle('rank 1 waits for 90 s');
    settle('rank 2 waits for 90 s');
    settle('rank 2 waits for 2 min');
    expect(published).toEqual([
      'rank 1 waits for 90 s',
      'rank 2 waits for 90 s',
      'rank 2 waits for 2 min'
    ]);
  });

  it('publishes nothing if the text changes back in time', () => {
    settle('no cell runs');
    announcements.update(['the ranks run a cell']);
    settle('no cell runs');
    expect(published).toEqual(['no cell runs']);
  });

  it('publishes nothing after it is cancelled', () => {
    announcements.update(['no cell runs']);
    announcements.cancel();
    vi.advanceTimersByTime(LONG_MS);
    expect(published).toEqual([]);
  });
});
