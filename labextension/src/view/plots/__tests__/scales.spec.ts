import { describe, expect, it } from 'vitest';

import { timeRange, timeTicks, valueRange, valueTicks } from '../scales';

describe('valueRange', () => {
  it('does not magnify noise', () => {
    const [low, high] = valueRange('bytes', 0.2446, 0.2448);
    expect(high - low).toBeCloseTo(1.12 * 0.1 * 0.2448, 10);
    const [bottom, top] = valueRange('metric', 2.3025, 2.3026);
    expect(top - bottom).toBeCloseTo(1.12 * 0.02 * 2.3026, 10);
    expect((top + bottom) / 2).toBeCloseTo(2.30255, 10);
  });

  it('leaves space above and below', () => {
    const [low, high] = valueRange('metric', -5, 5);
    expect(low).toBeCloseTo(-5.6, 10);
    expect(high).toBeCloseTo(5.6, 10);
  });

  it('begins at 0 for values that cannot be negative', () => {
    expect(valueRange('percent', 3, 4)).toEqual([0, 100]);
    expect(valueRange('percent', 3, 800)).toEqual([0, 848]);
    expect(valueRange('rate', 38, 50)).toEqual([0, 53]);
    expect(valueRange('rate', 0, 0)).toEqual([0, 1]);
    expect(valueRange('bytes', 0, 10)[0]).toBe(0);
    expect(valueRange('metric', 0, 10)[0]).toBe(0);
  });

  it('exists for zeros', () => {
    expect(valueRange('metric', 0, 0)).toEqual([0, 1]);
  });
});

describe('valueTicks', () => {
  it('are multiples of the step', () => {
    expect(valueTicks('metric', null, [-0.3, 1.2], 0.5)).toEqual([0, 0.5, 1]);
    expect(valueTicks('rate', null, [0, 53], 20)).toEqual([0, 20, 40]);
  });

  it('are the value itself if it is constant, unless y begins at 0', () => {
    const range = valueRange('metric', 0.001, 0.001);
    expect(valueTicks('metric', 0.001, range, 5e-6)).toEqual([0.001]);
    expect(valueTicks('percent', 38, [0, 100], 50)).toEqual([0, 50, 100]);
  });
});

describe('timeRange', () => {
  it('is 10 s at least', () => {
    expect(timeRange([99.5, 100], 99.5, 100)).toEqual([90, 100]);
    expect(timeRange([50, 70, 100], 50, 100)).toEqual([50, 100]);
  });

  it('ends at a single value, around which uPlot proposes years', () => {
    expect(timeRange([1.8e9], 0.8e9, 2.8e9)).toEqual([1.8e9 - 10, 1.8e9]);
  });
});

describe('timeTicks', () => {
  it('counts round steps back from the last value', () => {
    expect(timeTicks(1000, 900, 1000, 4)).toEqual([910, 940, 970, 1000]);
  });

  it('has ticks of the visible range after zooming', () => {
    expect(timeTicks(1000, 900, 950, 5)).toEqual([
      900, 910, 920, 930, 940, 950
    ]);
  });

  it('uses whole days for long times', () => {
    const day = 86_400;
    expect(timeTicks(10 * day, 0, 10 * day, 4)).toEqual([
      day,
      4 * day,
      7 * day,
      10 * day
    ]);
  });

  it('exists without room', () => {
    expect(timeTicks(1000, 900, 1000, 0)).toEqual([1000]);
  });
});
