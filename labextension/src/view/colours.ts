/**
 * Colours and dashes of ranks and of plots.
 *
 * Covers: a line per rank that differs by colour and by dash, the theme's own
 * colours, with fallbacks for front ends without JupyterLab's variables.
 * Does not cover: what is drawn (plot).
 */

/**
 * After Wong 2011, so that most forms of colour blindness tell them apart;
 * each has a contrast of 3:1 on white and on JupyterLab's dark background.
 * notebook/still.py has the same.
 */
const OF_RANKS = [
  '#0072b2',
  '#c27800',
  '#009e73',
  '#d55e00',
  '#c76fa1',
  '#2e8fc4',
  '#8f8300',
  '#8a6fd1'
];

/** Lengths of strokes and gaps in px. */
const DASHES = [
  [],
  [8, 3],
  [2, 2],
  [8, 3, 2, 3],
  [14, 4],
  [4, 4],
  [14, 3, 2, 3],
  [5, 2, 1, 2]
];

export function colourOfRank(rank: number): string {
  return OF_RANKS[rank % OF_RANKS.length] ?? '#0072b2';
}

/** The dash of a rank: with its colour, another one for each of 64 ranks. */
export function dashOfRank(rank: number): number[] {
  const turn = rank + Math.floor(rank / OF_RANKS.length);
  return DASHES[turn % DASHES.length] ?? [];
}

export interface IPalette {
  text: string;
  grid: string;
  band: string;
  mean: string;
  /** Of a line that all ranks share. */
  common: string;
}

/** The theme's colours; a plot keeps them from when it is made. */
export function palette(node: HTMLElement): IPalette {
  const style = getComputedStyle(node);
  const of = (name: string, otherwise: string): string =>
    style.getPropertyValue(name).trim() || otherwise;
  return {
    text: of('--jdt-text-quiet', '#616161'),
    grid: of('--jdt-border', '#e0e0e0'),
    band: 'rgba(0, 114, 178, 0.22)',
    mean: '#0072b2',
    common: of('--jdt-text', '#212121')
  };
}
