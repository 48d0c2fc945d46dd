/**
 * The legend of a plot: a line's look, its rank, its value.
 *
 * Covers: the last values as text, or those under the pointer; hiding a rank.
 * Does not cover: the plot (plot), which ranks are hidden (charts).
 */

import { colourOfRank, dashOfRank } from './colours';
import { button, element, setText, short } from './dom';
import type { ILines } from './plot';
import type { Line } from './series';
import type { Translate } from './types';

/** More lines than this are summed up by the lowest and the highest. */
const MOST_ENTRIES = 8;
const SVG = 'http://www.w3.org/2000/svg';

interface IEntry {
  label: string;
  value: string;
  rank: number | null;
  isHidden: boolean;
}

export class Legend {
  readonly node = element('div', { class: 'jdt-legend' });
  private made = '';

  constructor(
    private readonly trans: Translate,
    private readonly onRank: (rank: number) => void
  ) {}

  /** Show the values at a place of x; without one, the last. */
  show(data: ILines, at: number | null, place: string): void {
    const entries = this.entriesOf(data, at);
    const key = JSON.stringify(
      entries.map(each => [each.label, each.isHidden])
    );
    if (key !== this.made) {
      this.made = key;
      this.node.replaceChildren(
        element('span', { class: 'jdt-place' }),
        ...entries.map(each => this.entry(each))
      );
    }
    const values = this.node.querySelectorAll('.jdt-value');
    entries.forEach((each, index) => {
      const node = values[index];
      if (node !== undefined) {
        setText(node, each.value);
      }
    });
    const [first] = this.node.children;
    if (first !== undefined) {
      setText(first, place);
    }
  }

  /** The values in words, for the plot's description. */
  words(data: ILines, at: number | null): string {
    return this.entriesOf(data, at)
      .filter(each => !each.isHidden && each.value !== '–')
      .map(each => `${each.label}: ${each.value}`)
      .join(', ');
  }

  private entriesOf(data: ILines, at: number | null): IEntry[] {
    const valueOf = (line: Line): number | null =>
      at === null ? lastOf(line) : (line[at] ?? null);
    const shown = data.lines.map(line => ({
      ...line,
      y: valueOf(line.values)
    }));
    if (shown.length > MOST_ENTRIES) {
      const known = shown.filter(each => each.y !== null);
      known.sort((a, b) => (a.y ?? 0) - (b.y ?? 0));
      return [
        ...this.extreme(this.trans('lowest'), known[0]),
        ...this.extreme(this.trans('highest'), known.at(-1))
      ];
    }
    const entries: IEntry[] = shown.map(each => ({
      label: each.label,
      value: textOf(each.y),
      rank: each.rank,
      isHidden: false
    }));
    const { band } = data;
    if (band !== undefined) {
      const low = textOf(valueOf(band.least));
      const high = textOf(valueOf(band.greatest));
      entries.push({
        label: this.trans('range'),
        value: this.trans('%1 to %2', low, high),
        rank: null,
        isHidden: false
      });
    }
    for (const rank of data.hidden) {
      const label = this.trans('rank %1', String(rank));
      entries.push({ label, value: '', rank, isHidden: true });
    }
    return entries.sort((a, b) => (a.rank ?? -1) - (b.rank ?? -1));
  }

  private extreme(
    word: string,
    line: { label: string; y: number | null; rank: number | null } | undefined
  ): IEntry[] {
    return line === undefined
      ? []
      : [
          {
            label: `${word} ${line.label}`,
            value: textOf(line.y),
            rank: null,
            isHidden: false
          }
        ];
  }

  private entry({ label, rank, isHidden }: IEntry): HTMLElement {
    const value = element('span', { class: 'jdt-value' });
    if (rank === null) {
      return element('span', { class: 'jdt-entry' }, `${label}: `, value);
    }
    const made = button('', '', () => {
      this.onRank(rank);
    });
    made.className = 'jdt-entry';
    made.title = isHidden
      ? this.trans('show rank %1 in all plots', String(rank))
      : this.trans('hide rank %1 in all plots', String(rank));
    made.setAttribute('aria-pressed', String(!isHidden));
    made.append(swatch(rank), isHidden ? label : `${label}: `, value);
    return made;
  }
}

/** How a rank's line looks. */
function swatch(rank: number): SVGElement {
  const made = document.createElementNS(SVG, 'svg');
  made.setAttribute('class', 'jdt-swatch');
  made.setAttribute('viewBox', '0 0 22 6');
  made.setAttribute('aria-hidden', 'true');
  const line = document.createElementNS(SVG, 'path');
  line.setAttribute('d', 'M0 3H22');
  line.setAttribute('stroke', colourOfRank(rank));
  line.setAttribute('stroke-width', '2.5');
  line.setAttribute('stroke-dasharray', dashOfRank(rank).join(' '));
  made.append(line);
  return made;
}

function textOf(value: number | null): string {
  return value === null ? '–' : short(value);
}

function lastOf(line: Line): number | null {
  return line.findLast(value => value !== null) ?? null;
}
