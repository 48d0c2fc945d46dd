import { describe, expect, it } from 'vitest';

import {
  frame,
  makeCluster,
  makeMetrics,
  makeRank,
  makeVariable,
  makeVariables
} from '../../__tests__/data';
import {
  isCluster,
  isDeviceHistory,
  isPlots,
  isRecord,
  messageOf,
  readBufferedMetrics,
  readLogs,
  readReply,
  readServerMessage,
  readState,
  readVariables
} from '../messages';

const METRICS = makeMetrics([
  { name: 'loss', value: 0.5, step: 7, rank: 3, cell: 2 },
  { name: 'accuracy', value: 0.25, rank: 1, cell: 2 }
]);
const HEADER = { count: 2, names: METRICS.names, first: true };

describe('guards', () => {
  it('takes objects that are no arrays for records', () => {
    expect([{}, { a: 1 }, [], null, 'a', undefined].map(isRecord)).toEqual([
      true,
      true,
      false,
      false,
      false,
      false
    ]);
  });

  it('knows the settings of plots', () => {
    expect(['all', 'none', 'some', 1].map(isPlots)).toEqual([
      true,
      true,
      false,
      false
    ]);
  });

  it('requires what a cluster of any version has', () => {
    expect(isCluster(makeCluster([]))).toBe(true);
    expect(isCluster({ id: 'c1', ranks: [] })).toBe(false);
    expect(isCluster({ id: 1, ranks: [], nodes: [] })).toBe(false);
  });

  it('requires a list of samples per rank', () => {
    expect(isDeviceHistory({ 0: [[1, 2]] })).toBe(true);
    expect(isDeviceHistory({ 0: 1 })).toBe(false);
    expect(isDeviceHistory([])).toBe(false);
  });
});

describe('readState', () => {
  it('leaves out items that are incomplete', () => {
    const cluster = makeCluster([makeRank(0)]);
    const starting = { id: 's', name: 'new', text: 'starting: 0 of 2 ranks' };
    const unreadable = { id: 'u', name: 'old', version: '0.0.1', own: '0.1.0' };
    expect(
      readState({
        clusters: [cluster, { id: 'broken' }],
        starting: [starting, { id: 's' }],
        unreadable: [unreadable, { name: 'x' }]
      })
    ).toEqual({
      clusters: [cluster],
      starting: [starting],
      unreadable: [unreadable]
    });
  });

  it('accepts a state of clusters alone, and nothing without them', () => {
    expect(readState({ clusters: [] })).toEqual({
      clusters: [],
      starting: [],
      unreadable: []
    });
    expect(readState({ starting: [] })).toBeNull();
    expect(readState('state')).toBeNull();
  });
});

describe('readServerMessage', () => {
  it('reads a state', () => {
    const cluster = makeCluster([]);
    const text = JSON.stringify({ type: 'state', clusters: [cluster] });
    expect(readServerMessage(text)).toEqual({
      kind: 'state',
      state: { clusters: [cluster], starting: [], unreadable: [] }
    });
  });

  it('reads device histories', () => {
    const ranks = { 0: [[1, 50, 2e9, null, null, null]] };
    const text = JSON.stringify({ type: 'devices', id: 'c1', ranks });
    expect(readServerMessage(text)).toEqual({
      kind: 'devices',
      id: 'c1',
      devices: ranks
    });
    const broken = JSON.stringify({ type: 'devices', id: 'c1', ranks: 1 });
    expect(readServerMessage(broken)).toBeNull();
  });

  it('reads binary metrics', () => {
    const data = frame({ id: 'c1', ...HEADER }, METRICS);
    expect(readServerMessage(data)).toEqual({
      kind: 'metrics',
      id: 'c1',
      metrics: { ...METRICS, first: true }
    });
  });

  it('ignores binary data without a cluster or a count', () => {
    expect(readServerMessage(frame(HEADER, METRICS))).toBeNull();
    expect(readServerMessage(frame({ id: 'c1' }, METRICS))).toBeNull();
  });

  it('ignores JSON that is no message', () => {
    expect(readServerMessage('[]')).toBeNull();
    expect(readServerMessage('{"type": "other"}')).toBeNull();
  });
});

describe('readBufferedMetrics', () => {
  it('reads columns at any offset of the buffer', () => {
    const columns = frame({}, METRICS).slice(8);
    const moved = new Uint8Array(columns.byteLength + 3);
    moved.set(new Uint8Array(columns), 3);
    const view = new DataView(moved.buffer, 3, columns.byteLength);
    expect(readBufferedMetrics(HEADER, [view])).toEqual({
      ...METRICS,
      first: true
    });
  });

  it('is null without a buffer or a header', () => {
    expect(readBufferedMetrics(HEADER, [])).toBeNull();
    expect(readBufferedMetrics(HEADER, undefined)).toBeNull();
    expect(readBufferedMetrics({}, [new DataView(new ArrayBuffer(0))])).toBe(
      null
    );
  });
});

describe('readLogs', () => {
  it('leaves out logs with parts that are no output', () => {
    const log = {
      rank: 0,
      parts: [{ stream: 'stdout', text: 'a' }],
      is_cut: false
    };
    const broken = { rank: 1, parts: [{ stream: 'stdin', text: 'a' }] };
    expect(readLogs({ logs: [log, broken, 1] })).toEqual([log]);
    expect(readLogs({})).toEqual([]);
    expect(readLogs(null)).toEqual([]);
  });
});

describe('readVariables', () => {
  it('leaves out variables that are incomplete', () => {
    const content = makeVariables(
      [makeVariable('x', { size_bytes: 24 }), makeVariable('y')],
      { silent: '3', least_tensor_bytes: 24, most_tensor_bytes: 48 }
    );
    const broken = [{ ...content.variables[0], size_bytes: '24' }, { name: 1 }];
    expect(
      readVariables({
        ...content,
        variables: [...content.variables, ...broken, null]
      })
    ).toEqual(content);
  });

  it('is empty without a reply', () => {
    expect(readVariables('lost')).toEqual(makeVariables([], { ranks: '' }));
  });
});

describe('readReply', () => {
  it('returns the content of a success', async () => {
    expect(await readReply(Response.json({ done: 'interrupt' }))).toEqual({
      done: 'interrupt'
    });
  });

  it('throws the message of a failure, or its status', async () => {
    const refused = Response.json({ message: 'not yours' }, { status: 409 });
    await expect(readReply(refused)).rejects.toThrow('not yours');
    const init = { status: 404, statusText: 'Not Found' };
    await expect(readReply(Response.json({}, init))).rejects.toThrow(
      '404 Not Found'
    );
  });
});

describe('messageOf', () => {
  it('is the message of an error, or the value as text', () => {
    expect(messageOf(new Error('lost'))).toBe('lost');
    expect(messageOf('lost')).toBe('lost');
  });
});
