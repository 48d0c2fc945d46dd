// Sends the widget the state and the metrics of a cluster with many ranks, through the interface of anywidget.
import widget from '/widget.js';

const METRICS = 6;
const UPDATE_MS = 100;
const STATE_MS = 500;
const DEVICES_MS = 1000;

function clusterOf(ranks, tick) {
  return {
    id: 'bench', name: 'bench', launcher: 'mpi', backend: 'gloo', started_s: 0, notebook: '', held: true, kept: false,
    logs: '', sample_s: 1, remarks: [], hang: [],
    nodes: Array.from({ length: Math.ceil(ranks / 8) }, (_, at) => ({
      host: `node${at}`, cores: 64, cpu_percent: (tick * 7 + at) % 100, load: 8, memory_used_bytes: 2 ** 36,
      memory_total_bytes: 2 ** 38, disk_free_bytes: 2 ** 40, received_bytes_per_s: tick,
      sent_bytes_per_s: tick, infiniband_received_bytes_per_s: 0, infiniband_sent_bytes_per_s: 0
    })),
    ranks: Array.from({ length: ranks }, (_, rank) => ({
      rank, host: `node${Math.floor(rank / 8)}`, local_rank: rank % 8, device: `cuda:${rank % 8}`, pid: 1000 + rank,
      state: 'running', text: 'running', cpu_percent: (tick * 3 + rank) % 100, memory_bytes: 2 ** 30 + tick, steps: tick,
      cell: 3, line: 4 + (tick % 5), steps_per_s: 9 + ((tick + rank) % 10) / 10, waiting: 0.1, done: tick, total: 10000,
      left_s: 100,
      gpu: { name: 'GPU', percent: (tick + rank) % 100, memory_used_bytes: 2 ** 35, memory_total_bytes: 2 ** 36 }
    }))
  };
}

function packetOf(ranks, step) {
  const count = ranks * METRICS;
  const data = new ArrayBuffer(count * 20);
  const steps = new Float64Array(data, 0, count).fill(step);
  const values = new Float32Array(data, 8 * count, count);
  const cells = new Int32Array(data, 12 * count, count).fill(1);
  const names = new Uint16Array(data, 16 * count, count);
  const at = new Uint16Array(data, 18 * count, count);
  for (let index = 0; index < count; index += 1) {
    names[index] = index % METRICS;
    at[index] = Math.floor(index / METRICS);
    values[index] = Math.exp(-step / 300) + at[index] / ranks + Math.random() / 20;
  }
  const header = { count, names: Array.from({ length: METRICS }, (_, name) => `metric${name}`), first: step === 0 };
  return [header, new DataView(data)];
}

/** Show a cluster; returns its element, its model state, a function that emits an event, the messages it sent, and `end`. */
window.show = ranks => {
  const listeners = new Map();
  const sent = [];
  const state = { state: clusterOf(ranks, 0), ended: '', key: String(Math.random()) };
  const model = {
    get: name => state[name],
    on: (event, callback) => listeners.set(event, [...(listeners.get(event) ?? []), callback]),
    off: (event, callback) => listeners.set(event, (listeners.get(event) ?? []).filter(each => each !== callback)),
    send: content => sent.push(content)
  };
  const emit = (event, ...args) => (listeners.get(event) ?? []).forEach(each => each(...args));
  const el = document.createElement('div');
  document.body.replaceChildren(el);
  const stopped = widget.initialize({ model });
  const removed = widget.render({ model, el });
  const end = () => {
    removed();
    stopped();
  };
  return { el, state, emit, sent, end };
};

/** Show a cluster and send updates for some seconds; returns frame times. With `scrolls` the table is scrolled. */
window.measure = async (ranks, seconds, scrolls) => {
  const { el, state, emit, end } = window.show(ranks);
  let step = 0;
  const timers = [
    setInterval(() => {
      const [header, data] = packetOf(ranks, step);
      emit('msg:custom', { metrics: header }, [data]);
      step += 1;
    }, UPDATE_MS),
    setInterval(() => {
      state.state = clusterOf(ranks, step);
      emit('change:state');
    }, STATE_MS),
    setInterval(() => {
      const devices = Array.from({ length: ranks }, (_, rank) => [String(rank), [[step, 50, 2 ** 30, 50, 2 ** 35, 9]]]);
      emit('msg:custom', { devices: Object.fromEntries(devices) }, []);
    }, DEVICES_MS)
  ];
  await new Promise(resolve => setTimeout(resolve, 2000)); // until the first plots are drawn
  const frames = [];
  const scroller = el.querySelector('.jdt-table-scroller');
  const begun = performance.now();
  const height = Math.max(1, scroller.scrollHeight - scroller.clientHeight);
  let top = 0;
  await new Promise(resolve => {
    const next = now => {
      frames.push(now);
      if (scrolls) {
        top = (top + 4) % height; // without reading scrollTop, as a wheel does
        scroller.scrollTop = top;
      }
      if (now - begun < 1000 * seconds) {
        requestAnimationFrame(next);
      } else {
        resolve();
      }
    };
    requestAnimationFrame(next);
  });
  timers.forEach(clearInterval);
  const rows = el.querySelectorAll('tbody tr').length;
  end();
  const gaps = frames.slice(1).map((now, index) => now - frames[index]).sort((a, b) => a - b);
  return {
    fps: (1000 * gaps.length) / (frames.at(-1) - frames[0]),
    gap95: gaps[Math.floor(0.95 * gaps.length)],
    rows
  };
};
window.ready = true;
