import { describe, expect, it } from 'vitest';

import { makeRank } from '../../../__tests__/data';
import type { IRank } from '../../../protocol/types';
import { CellEnds, Repeater } from '../refresh';

function idle(uses: number): IRank[] {
  return [
    makeRank(0, { state: 'idle', uses: 2 }),
    makeRank(1, { state: 'idle', uses })
  ];
}

const RUNNING = [makeRank(0, { state: 'idle' }), makeRank(1)];
const IN_COLLECTIVE = [makeRank(0, { state: 'in collective' })];

describe('CellEnds', () => {
  it('notices when no rank runs a cell any more, once', () => {
    const ends = new CellEnds();
    const states = [idle(2), RUNNING, IN_COLLECTIVE, idle(2), idle(2)];
    expect(states.map(each => ends.check(each))).toEqual([
      false,
      false,
      false,
      true,
      false
    ]);
  });

  it('notices a cell that was never seen to run', () => {
    const ends = new CellEnds();
    expect([idle(2), idle(2), idle(4)].map(each => ends.check(each))).toEqual([
      false,
      false,
      true
    ]);
  });

  it('waits until other cells have ended, too', () => {
    const ends = new CellEnds();
    ends.check(idle(2));
    const ended = makeRank(0, { state: 'idle', uses: 4 });
    expect(ends.check([ended, makeRank(1)])).toBe(false);
    expect(ends.check(idle(2))).toBe(true);
  });
});

/** A call that the test ends. */
class Call {
  count = 0;
  end: () => void = () => undefined;

  readonly begin = (): Promise<void> => {
    this.count++;
    return new Promise(resolve => {
      this.end = resolve;
    });
  };
}

describe('Repeater', () => {
  it('makes one call at a time, and one more for all requests meanwhile', async () => {
    const call = new Call();
    const repeater = new Repeater(call.begin);
    const done = repeater.request();
    await repeater.request();
    await repeater.request();
    expect(call.count).toBe(1);
    call.end();
    await expect.poll(() => call.count).toBe(2);
    call.end();
    await done;
    expect(call.count).toBe(2);
  });

  it('drops a request that was cancelled', async () => {
    const call = new Call();
    const repeater = new Repeater(call.begin);
    const done = repeater.request();
    await repeater.request();
    repeater.cancel();
    call.end();
    await done;
    expect(call.count).toBe(1);
  });

  it('calls again after a failure', async () => {
    let count = 0;
    const repeater = new Repeater(() => {
      count++;
      return Promise.reject(new Error('lost'));
    });
    await expect(repeater.request()).rejects.toThrow('lost');
    await expect(repeater.request()).rejects.toThrow('lost');
    expect(count).toBe(2);
  });
});
