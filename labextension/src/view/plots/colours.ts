/**
 * Colours and dashes of ranks and of plots.
 *
 * Covers: lines of ranks that differ by colour and by dash, the theme's colours,
 * with defaults for front ends that do not define JupyterLab's variables.
 * Does not cover: drawing (plot, legend).
 */

/**
 * After Wong 2011, distinguishable with most forms of colour blindness. Each has
 * a contrast of 3:1 on white and on JupyterLab's dark background.
 * notebook/views/static_html.py has the same colours.
 */
const RANK_COLOURS = [
  '#0072b2',
  '#c27800',
  '#009e73',
  '#d55e00',
  '#c76fa1',
  '#2e8fc4',
  '#8f8300',
  '#8a6fd1'
];

/** Lengths of dashes and gaps in px. */
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
  return RANK_COLOURS[rank % RANK_COLOURS.length] ?? '#0072b2';
}

/** The dash of a rank: colour and dash together are unique for 64 ranks. */
export function dashOfRank(rank: number): number[] {
  const index = rank + Math.floor(rank / RANK_COLOURS.length);
  return DASHES[index % DASHES.length] ?? [];
}

export interface IPalette {
  text: string;
  grid: string;
  band: string;
  mean: string;
  /** For a line that all ranks share. */
  common: string;
}

/** The theme's colours; a plot keeps those with which it was made. */
export function palette(node: HTMLElement): IPalette {
  const style = getComputedStyle(node);
  const of = (name: string, fallback: string): string =>
    style.getPropertyValue(name).trim() || fallback;
  return {
    text: of('--jdt-text-muted', '#616161'),
    grid: of('--jdt-border', '#e0e0e0'),
    band: 'rgba(0, 114, 178, 0.22)',
    mean: '#0072b2',
    common: of('--jdt-text', '#212121')
  };
}
