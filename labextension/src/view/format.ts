/**
 * Format numbers, sizes, durations and tables for the user.
 */

const MIB = 2 ** 20;
const GIB = 2 ** 30;
/** Ticks whose ratio is larger, on a logarithmic axis, have exponents. */
const MAX_RATIO = 1e3;
/** The error of a tick's label, as a fraction of the distance to the next. */
const TICK_TOLERANCE = 5e-4;
const MAX_DECIMALS = 12;

export interface IByteUnit {
  name: string;
  /** In bytes. */
  size: number;
}

/** The unit for sizes up to a number of bytes; MiB is the smallest. */
export function byteUnit(largest: number): IByteUnit {
  return largest < GIB
    ? { name: 'MiB', size: MIB }
    : { name: 'GiB', size: GIB };
}

export function formatBytes(bytes: number): string {
  const { name, size } = byteUnit(bytes);
  return `${(bytes / size).toFixed(name === 'GiB' ? 1 : 0)} ${name}`;
}

/** A size of any magnitude in decimal units, as %dist_whos shows it. */
export function formatSize(bytes: number): string {
  if (bytes >= 1e9) {
    return `${(bytes / 1e9).toFixed(1)} GB`;
  }
  if (bytes >= 1e6) {
    return `${(bytes / 1e6).toFixed(1)} MB`;
  }
  return bytes >= 1e3
    ? `${(bytes / 1e3).toFixed(1)} kB`
    : `${bytes.toFixed(0)} B`;
}

/** Bytes per second in decimal units, as network hardware is specified. */
export function formatRate(bytesPerSecond: number): string {
  if (bytesPerSecond >= 1e9) {
    return `${(bytesPerSecond / 1e9).toFixed(1)} GB/s`;
  }
  if (bytesPerSecond >= 1e6) {
    return `${(bytesPerSecond / 1e6).toFixed(1)} MB/s`;
  }
  return bytesPerSecond >= 1e3
    ? `${(bytesPerSecond / 1e3).toFixed(0)} kB/s`
    : `${bytesPerSecond.toFixed(0)} B/s`;
}

export function formatDuration(seconds: number): string {
  if (seconds < 120) {
    return `${seconds.toFixed(0)} s`;
  }
  return seconds < 7200
    ? `${(seconds / 60).toFixed(0)} min`
    : `${(seconds / 3600).toFixed(1)} h`;
}

/** Time before the last value, as "now", "-30 s", "-5 min" or "-2 h". */
export function formatAge(seconds: number): string {
  const age = Math.round(seconds);
  if (age === 0) {
    return 'now';
  }
  if (age % 3600 === 0) {
    return `-${String(age / 3600)} h`;
  }
  if (age % 60 === 0 || age > 3600) {
    return `-${String(Math.round(age / 60))} min`;
  }
  return `-${String(age)} s`;
}

/** A number with some significant digits. */
export function formatNumber(value: number, digits = 4): string {
  if (value === 0) {
    return '0';
  }
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3
    ? value.toExponential(2)
    : value.toLocaleString('en', { maximumSignificantDigits: digits });
}

/**
 * Format the ticks of one axis in one notation, with as many decimals as the
 * distance between them needs; null, a tick without a label, is empty.
 */
export function formatTicks(ticks: (number | null)[]): string[] {
  const known = ticks.filter(tick => tick !== null);
  const sizes = known.map(Math.abs).filter(size => size > 0);
  const [least, most] = [Math.min(...sizes), Math.max(0, ...sizes)];
  const isExponential = most < 1e-3 || most >= 1e5 || most > MAX_RATIO * least;
  const distances = known.slice(1).map((tick, at) => tick - (known[at] ?? 0));
  const tolerance = TICK_TOLERANCE * Math.min(most, ...distances);
  const round = (tick: number, decimals: number): string =>
    isExponential ? tick.toExponential(decimals) : tick.toFixed(decimals);
  let decimals = 0;
  while (
    decimals < MAX_DECIMALS &&
    known.some(
      tick => Math.abs(Number(round(tick, decimals)) - tick) > tolerance
    )
  ) {
    decimals++;
  }
  return ticks.map(tick => {
    if (tick === null) {
      return '';
    }
    if (isExponential) {
      return tick === 0 ? '0' : round(tick, decimals);
    }
    return tick.toLocaleString('en', {
      minimumFractionDigits: decimals,
      maximumFractionDigits: decimals
    });
  });
}

export function formatPercent(fraction: number): string {
  return `${(100 * fraction).toFixed(0)} %`;
}

export function formatCount(value: number): string {
  return value.toLocaleString('en');
}

/** Replace %1, %2, ... by arguments, as JupyterLab's translator does. */
export function formatMessage(text: string, ...args: string[]): string {
  return text.replace(
    /%(\d)/g,
    (_, digit: string) => args[Number(digit) - 1] ?? ''
  );
}

/** Format a table as CSV (RFC 4180, with line feeds); null is an empty field. */
export function formatCsv(
  titles: string[],
  rows: (string | number | null)[][]
): string {
  return [titles, ...rows]
    .map(row => `${row.map(csvField).join(',')}\n`)
    .join('');
}

function csvField(value: string | number | null): string {
  const text = String(value ?? '');
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
