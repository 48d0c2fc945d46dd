import { describe, expect, it } from 'vitest';

import { makeMetrics, translate } from '../../../__tests__/data';
import { DeviceStore } from '../../../stores/deviceStore';
import { MetricStore, type Series } from '../../../stores/metricStore';
import {
  constantValue,
  DEVICE_PLOTS,
  deviceData,
  type IDevicePlot,
  type IPlotData,
  type IRankSelection,
  metricData,
  plotCsv,
  reduceLines,
  titleWithUnit
} from '../plotData';

const ALL: IRankSelection = {
  hidden: new Set(),
  filter: null,
  silent: new Set()
};
const GIB = 2 ** 30;

function makeSeries(): Series {
  const store = new MetricStore();
  store.add(
    makeMetrics([
      { name: 'loss', value: 4, step: 0, rank: 10 },
      { name: 'loss', value: 2, step: 1, rank: 10 },
      { name: 'loss', value: 1, step: 0, rank: 2 }
    ])
  );
  const series = store.byName.get('loss');
  if (series === undefined) {
    throw new Error('no loss');
  }
  return series;
}

function devicePlot(title: string): IDevicePlot {
  const plot = DEVICE_PLOTS.find(each => each.title === title);
  if (plot === undefined) {
    throw new Error(`no plot ${title}`);
  }
  return plot;
}

describe('metricData', () => {
  it('has a line per rank, in their order', () => {
    expect(metricData(makeSeries(), 0, ALL, translate)).toEqual({
      x: [0, 1],
      lines: [
        { label: 'rank 2', rank: 2, values: [1, null] },
        { label: 'rank 10', rank: 10, values: [4, 2] }
      ],
      hidden: [],
      lastCommonX: 0
    });
  });

  it('leaves out hidden ranks, and those that do not match', () => {
    const labelsOf = (selection: IRankSelection): [string[], number[]] => {
      const data = metricData(makeSeries(), 0, selection, translate);
      return [data.lines.map(line => line.label), data.hidden];
    };
    const hidden = new Set([2, 5]);
    expect(labelsOf({ ...ALL, hidden })).toEqual([['rank 10'], [2]]);
    const filter = new Set([2]);
    expect(labelsOf({ ...ALL, filter })).toEqual([['rank 2'], []]);
  });

  it('knows the last step of all ranks that report', () => {
    const lastX = (part: Partial<IRankSelection>): number =>
      metricData(makeSeries(), 0, { ...ALL, ...part }, translate).lastCommonX;
    expect(lastX({ silent: new Set([2]) })).toBe(1);
    expect(lastX({ hidden: new Set([2]) })).toBe(1);
    expect(lastX({ silent: new Set([2, 10]) })).toBe(0);
  });

  it('is smoothed', () => {
    const { lines } = metricData(makeSeries(), 0.5, ALL, translate);
    expect(lines[1]?.values[1]).toBeCloseTo(2 / 0.75, 10);
  });
});

describe('deviceData', () => {
  const store = new DeviceStore();
  store.add({
    0: [
      [10.1, 50, 0.5 * GIB, null, null, null],
      [12, 60, GIB, null, null, 4]
    ],
    1: [[9.9, 70, 0.25 * GIB, null, null, null]]
  });

  it('puts ranks on common seconds', () => {
    const cpu = devicePlot('CPU (% of a core)');
    expect(deviceData(store, cpu, ALL, translate)).toEqual({
      x: [10, 12],
      lines: [
        { label: 'rank 0', rank: 0, values: [50, 60] },
        { label: 'rank 1', rank: 1, values: [70, null] }
      ],
      hidden: [],
      lastCommonX: 10,
      unit: undefined
    });
  });

  it('has the unit of the largest size of all ranks', () => {
    const data = deviceData(store, devicePlot('memory'), ALL, translate);
    expect(data?.unit).toBe('GiB');
    expect(data?.lines.map(line => line.values)).toEqual([
      [0.5, 1],
      [0.25, null]
    ]);
    const small = new DeviceStore();
    small.add({ 0: [[1, 0, 46 * 2 ** 20, null, null, null]] });
    const other = deviceData(small, devicePlot('memory'), ALL, translate);
    expect([other?.unit, other?.lines[0]?.values]).toEqual(['MiB', [46]]);
  });

  it('leaves out ranks that do not report it; null if none does', () => {
    const steps = deviceData(store, devicePlot('steps/s'), ALL, translate);
    expect(steps?.x).toEqual([12]);
    expect(steps?.lines.map(line => line.label)).toEqual(['rank 0']);
    expect(steps?.lastCommonX).toBe(12);
    const gpu = devicePlot('GPU use (%)');
    expect(deviceData(store, gpu, ALL, translate)).toBeNull();
  });
});

describe('reduceLines', () => {
  const data: IPlotData = {
    x: [0, 1],
    lines: [
      { label: 'rank 0', rank: 0, values: [1, 2] },
      { label: 'rank 1', rank: 1, values: [3, 2] }
    ],
    hidden: [7],
    lastCommonX: 1,
    unit: 'GiB'
  };
  const equal: IPlotData = {
    ...data,
    lines: data.lines.map(line => ({ ...line, values: [5, 5] }))
  };

  it('leaves different lines unless the mean is asked for', () => {
    const options = { isMean: false, mayBeCommon: true };
    expect(reduceLines(data, options, translate)).toBe(data);
  });

  it('has mean and range', () => {
    const options = { isMean: true, mayBeCommon: true };
    expect(reduceLines(data, options, translate)).toEqual({
      x: [0, 1],
      lines: [{ label: 'mean', rank: null, values: [2, 2] }],
      band: { min: [1, 2], max: [3, 2] },
      hidden: [],
      lastCommonX: 1,
      unit: 'GiB'
    });
  });

  it('ends mean and range at the last step that all ranks have reported', () => {
    const options = { isMean: true, mayBeCommon: true };
    const early = { ...data, lastCommonX: 0.5 };
    expect(reduceLines(early, options, translate)).toMatchObject({
      x: [0],
      lines: [{ values: [2] }],
      band: { min: [1], max: [3] }
    });
  });

  it('has one line for equal metrics, and names it', () => {
    const options = { isMean: true, mayBeCommon: true };
    const [others] = reduceLines(equal, options, translate).lines;
    expect(others).toEqual({ label: 'all others', rank: null, values: [5, 5] });
    const shown = { ...equal, hidden: [] };
    const [all] = reduceLines(shown, options, translate).lines;
    expect(all?.label).toBe('all ranks');
  });

  it('does not merge equal device figures', () => {
    const options = { isMean: false, mayBeCommon: false };
    expect(reduceLines(equal, options, translate)).toBe(equal);
  });

  it('leaves a single line', () => {
    const one = { ...data, lines: data.lines.slice(0, 1) };
    const options = { isMean: true, mayBeCommon: true };
    expect(reduceLines(one, options, translate)).toBe(one);
  });
});

describe('constantValue', () => {
  const valueOf = (...curves: (number | null)[][]): number | null => {
    const lines = curves.map(values => ({ label: '', rank: 0, values }));
    return constantValue({ x: [], lines, hidden: [], lastCommonX: 0 });
  };

  it('is the value of all lines, but for rounding', () => {
    expect(valueOf([null, 0.1, 0.1], [0.1])).toBe(0.1);
    expect(valueOf([0.3, 0.1 + 0.2])).toBe(0.3);
    expect(valueOf([0, 0])).toBe(0);
  });

  it('is null for values that differ, and without values', () => {
    expect(valueOf([0.1, 0.1 + 1e-8])).toBeNull();
    expect(valueOf([1], [0])).toBeNull();
    expect(valueOf([null])).toBeNull();
  });

  it('is that of the range, not of the mean', () => {
    const data = {
      x: [0],
      lines: [{ label: 'mean', rank: null, values: [2] }],
      band: { min: [1], max: [3] },
      hidden: [],
      lastCommonX: 0
    };
    expect(constantValue(data)).toBeNull();
    expect(constantValue({ ...data, band: { min: [2], max: [2] } })).toBe(2);
  });
});

describe('plotCsv', () => {
  it('has a row per place of x', () => {
    const data = metricData(makeSeries(), 0, ALL, translate);
    expect(plotCsv(data, 'step')).toBe('step,rank 2,rank 10\n0,1,4\n1,,2\n');
  });
});

describe('titleWithUnit', () => {
  it('adds a unit if there is one', () => {
    expect(titleWithUnit('memory', 'GiB')).toBe('memory (GiB)');
    expect(titleWithUnit('loss')).toBe('loss');
  });
});
