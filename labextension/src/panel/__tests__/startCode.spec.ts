import { describe, expect, it } from 'vitest';

import { startCode, startOptions } from '../startCode';

describe('startCode', () => {
  it('loads the extension and starts ranks', () => {
    expect(startCode()).toBe('%load_ext jupyter_disttrain\n%dist_init');
    expect(startCode('-n 4')).toBe(
      '%load_ext jupyter_disttrain\n%dist_init -n 4'
    );
  });
});

describe('startOptions', () => {
  it('has an option for each field with a value', () => {
    expect(startOptions('', ' ')).toBe('');
    expect(startOptions('4', '')).toBe('-n 4');
    expect(startOptions('', 'node1:4, node2:4 ')).toBe(
      '--hosts node1:4,node2:4'
    );
    expect(startOptions('8', 'node1')).toBe('-n 8 --hosts node1');
  });
});
