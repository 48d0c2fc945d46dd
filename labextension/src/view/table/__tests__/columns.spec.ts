import { describe, expect, it } from 'vitest';

import { makeRank, translate } from '../../../__tests__/data';
import type { IRank } from '../../../protocol/types';
import { makeColumns } from '../columns';

/** The texts of a rank by column, without empty ones. */
function textsOf(rank: IRank): Record<string, string> {
  return Object.fromEntries(
    makeColumns(translate).flatMap(column => {
      const text = column.text(rank);
      return text === null ? [] : [[column.title, text]];
    })
  );
}

describe('makeColumns', () => {
  it('has texts for all figures', () => {
    const rank = makeRank(3, {
      text: 'running for 3 s',
      cell: 5,
      line: 12,
      steps_per_s: 38.2468,
      samples_per_s: 12_345,
      waiting: 0.256,
      waiting_for_data: 0,
      cpu_percent: 99.6,
      memory_bytes: 1.5 * 2 ** 30,
      gpu: {
        percent: 81,
        memory_used_bytes: 40 * 2 ** 30,
        memory_total_bytes: 80 * 2 ** 30,
        celsius: 65.4,
        watts: 350.2,
        limited_by: 'power',
        ecc_errors: 2,
        others: 1
      }
    });
    expect(textsOf(rank)).toEqual({
      rank: '3',
      state: 'running for 3 s',
      cell: '[5]',
      line: '12',
      'steps/s': '38.2',
      'samples/s': '12,300',
      'waits for ranks': '26 %',
      'waits for data': '0 %',
      CPU: '100 %',
      memory: '1.5 GiB',
      device: 'cuda:3',
      GPU: '81 %',
      'GPU memory': '40.0 GiB / 80.0 GiB',
      '°C': '65',
      W: '350',
      'GPU notes': 'slowed: power, 2 ECC errors, 1 other processes',
      pid: '1003'
    });
  });

  it('has no text for figures that a rank does not report', () => {
    expect(Object.keys(textsOf(makeRank(0)))).toEqual([
      'rank',
      'state',
      'device',
      'pid'
    ]);
    const idleGpu = makeRank(0, { gpu: { percent: 0, ecc_errors: 0 } });
    expect(textsOf(idleGpu).GPU).toBe('0 %');
    expect(textsOf(idleGpu)).not.toHaveProperty('GPU notes');
  });

  it('has a different priority for each column that may be dropped', () => {
    const priorities = makeColumns(translate)
      .map(column => column.priority)
      .filter(priority => priority > 0);
    expect(new Set(priorities).size).toBe(priorities.length);
  });
});
