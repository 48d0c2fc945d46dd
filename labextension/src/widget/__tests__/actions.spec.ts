import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { isRecord } from '../../protocol/messages';
import { type IModel, kernelActions, REPLY_TIMEOUT_MS } from '../actions';

type Callback = (...args: unknown[]) => void;

/** A model whose kernel replies when the test calls `reply`. */
class FakeModel implements IModel {
  readonly sent: Record<string, unknown>[] = [];
  readonly listeners = new Set<Callback>();

  get(): unknown {
    return undefined;
  }

  on(_event: string, callback: Callback): void {
    this.listeners.add(callback);
  }

  off(_event: string, callback: Callback): void {
    this.listeners.delete(callback);
  }

  send(content: unknown): void {
    if (isRecord(content)) {
      this.sent.push(content);
    }
  }

  reply(content: Record<string, unknown>, to = this.sent.length - 1): void {
    const reply = this.sent[to]?.token;
    this.listeners.forEach(listener => {
      listener({ reply, ...content });
    });
  }
}

describe('kernelActions', () => {
  beforeEach(() => {
    vi.useFakeTimers();
  });
  afterEach(() => {
    vi.useRealTimers();
  });

  it('sends the action, and resolves with the reply', async () => {
    const model = new FakeModel();
    const request = kernelActions(model).request('c1', 'interrupt');
    expect(model.sent).toMatchObject([{ ask: 'interrupt' }]);
    model.reply({});
    await request;
    expect(model.listeners.size).toBe(0);
  });

  it('rejects with the message of the kernel', async () => {
    const model = new FakeModel();
    const request = kernelActions(model).request('c1', 'stop');
    model.reply({ message: 'not yours' });
    await expect(request).rejects.toThrow('not yours');
  });

  it('reads logs', async () => {
    const model = new FakeModel();
    const logs = kernelActions(model).log('c1', 3);
    expect(model.sent).toMatchObject([{ ask: 'log', rank: 3 }]);
    const log = { rank: 3, parts: [], is_cut: false };
    model.reply({ logs: [log] });
    expect(await logs).toEqual([log]);
  });

  it('matches replies with requests', async () => {
    const model = new FakeModel();
    const actions = kernelActions(model);
    const first = actions.log('c1', 0);
    const second = actions.log('c1', 1);
    model.reply({ logs: [{ rank: 1, parts: [] }] }, 1);
    model.reply({ logs: [{ rank: 0, parts: [] }] }, 0);
    expect((await first)[0]?.rank).toBe(0);
    expect((await second)[0]?.rank).toBe(1);
  });

  it('rejects if a busy kernel does not reply', async () => {
    const model = new FakeModel();
    const request = kernelActions(model).request('c1', 'interrupt');
    const rejection = expect(request).rejects.toThrow('the kernel is busy');
    vi.advanceTimersByTime(REPLY_TIMEOUT_MS);
    await rejection;
    expect(model.listeners.size).toBe(0);
  });

  it('has no URL of logs, and no variables', () => {
    const actions = kernelActions(new FakeModel());
    expect(actions.logUrl('c1', 0)).toBeNull();
    expect(actions.variables).toBeUndefined();
  });
});
