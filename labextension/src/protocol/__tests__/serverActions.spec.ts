import { describe, expect, it } from 'vitest';

import { serverActions } from '../serverActions';

describe('serverActions', () => {
  it('requests the paths of the server extension', async () => {
    const requests: string[] = [];
    const log = { rank: 1, parts: [], is_cut: false };
    const actions = serverActions(
      path => `/base/${path}`,
      (url, method) => {
        requests.push(`${method} ${url}`);
        return Promise.resolve({ logs: [log] });
      }
    );
    await actions.request('c1', 'interrupt');
    expect(await actions.log('c1', 1)).toEqual([log]);
    await actions.log('c1', 'all');
    await actions.variables?.('c1');
    expect(requests).toEqual([
      'POST /base/clusters/c1/interrupt',
      'GET /base/clusters/c1/log?rank=1',
      'GET /base/clusters/c1/log?rank=all',
      'GET /base/clusters/c1/variables'
    ]);
    expect(actions.logUrl('c1', 1)).toBe('/base/clusters/c1/log/file?rank=1');
  });
});
