/**
 * The legend of a plot: for each line a sample, its label, its value.
 *
 * Covers: drawing, buttons that hide a rank.
 * Does not cover: which entries (legendEntries), which ranks are hidden (charts).
 */

import type { Translate } from '../../protocol/types';
import { button, element, setText } from '../dom';
import { colourOfRank, dashOfRank } from './colours';
import { type ILegendEntry, legendEntries } from './legendEntries';
import type { IPlotData } from './plotData';

const SVG = 'http://www.w3.org/2000/svg';

export class Legend {
  readonly node = element('div', { class: 'jdt-legend' });
  private drawn = '';

  constructor(
    private readonly trans: Translate,
    private readonly onRank: (rank: number) => void
  ) {}

  /**
   * Show values.
   *
   * @param index - the place of x; null shows the last values
   * @param position - the place of x as text
   */
  show(data: IPlotData, index: number | null, position: string): void {
    const entries = legendEntries(data, index, this.trans);
    const key = JSON.stringify(
      entries.map(each => [each.label, each.isHidden])
    );
    if (key !== this.drawn) {
      this.drawn = key;
      this.node.replaceChildren(
        element('span', { class: 'jdt-position' }),
        ...entries.map(each => this.makeEntry(each))
      );
    }
    const values = this.node.querySelectorAll('.jdt-value');
    entries.forEach((each, at) => {
      const node = values[at];
      if (node !== undefined) {
        setText(node, each.value);
      }
    });
    const [first] = this.node.children;
    if (first !== undefined) {
      setText(first, position);
    }
  }

  private makeEntry({ label, rank, isHidden }: ILegendEntry): HTMLElement {
    const value = element('span', { class: 'jdt-value' });
    if (rank === null) {
      const attributes = { class: 'jdt-legend-entry' };
      return element('span', attributes, `${label}: `, value);
    }
    const made = button('', '', () => {
      this.onRank(rank);
    });
    made.className = 'jdt-legend-entry';
    made.title = isHidden
      ? this.trans('show rank %1 in all plots', String(rank))
      : this.trans('hide rank %1 in all plots', String(rank));
    made.setAttribute('aria-pressed', String(!isHidden));
    made.append(swatch(rank), isHidden ? label : `${label}: `, value);
    return made;
  }
}

/** A sample of a rank's line. */
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
