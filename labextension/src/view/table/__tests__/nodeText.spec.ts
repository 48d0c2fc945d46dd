import { describe, expect, it } from 'vitest';

import { makeNode, makeRank, translate } from '../../../__tests__/data';
import type { INode } from '../../../protocol/types';
import { describeNode, type INodeText } from '../nodeText';

function describeWith(node: INode | undefined, isOnlyNode = false): INodeText {
  const ranks = [makeRank(0), makeRank(1)];
  const row = { kind: 'node', host: 'node1', node, ranks, isExpanded: true };
  return describeNode({ ...row, kind: 'node' }, isOnlyNode, translate);
}

describe('describeNode', () => {
  it('has what matters most in one line', () => {
    expect(describeWith(makeNode('node1')).brief).toBe(
      '2 ranks · load 3.1 · 8.3/256.0 GiB'
    );
  });

  it('leaves out the number of ranks of the only node', () => {
    expect(describeWith(makeNode('node1'), true).brief).toBe(
      'load 3.1 · 8.3/256.0 GiB'
    );
  });

  it('has all figures as details', () => {
    expect(describeWith(makeNode('node1'), true).details).toEqual([
      '2 ranks',
      '64 cores 12 % busy',
      'load 3.1',
      'memory 8.3 GiB of 256.0 GiB',
      'disk 100.0 GiB free',
      '↓ 2 kB/s ↑ 2.5 MB/s'
    ]);
  });

  it('has InfiniBand if it is used', () => {
    const node = makeNode('node1', {
      infiniband_received_bytes_per_s: 1e9,
      infiniband_sent_bytes_per_s: 2e9
    });
    expect(describeWith(node).details.at(-1)).toBe('InfiniBand 3.0 GB/s');
  });

  it('has the number of ranks of a node that has not reported', () => {
    expect(describeWith(undefined, true)).toEqual({
      brief: '2 ranks',
      details: ['2 ranks']
    });
  });
});
