/**
 * Colours of ranks and of plots.
 *
 * JupyterLab's variables with fallbacks, for VS Code has none of them.
 */

/** Told apart also with most forms of colour blindness (Wong 2011). */
const OF_RANKS = [
  '#0072b2',
  '#e69f00',
  '#009e73',
  '#d55e00',
  '#cc79a7',
  '#56b4e9',
  '#b3a400',
  '#8a6fd1'
];

export function colourOfRank(rank: number): string {
  return OF_RANKS[rank % OF_RANKS.length] ?? '#0072b2';
}

export interface IPalette {
  text: string;
  grid: string;
  band: string;
  mean: string;
}

/** What the theme at hand says; a plot keeps it from when it is made. */
export function palette(node: HTMLElement): IPalette {
  const style = getComputedStyle(node);
  const of = (name: string, otherwise: string): string =>
    style.getPropertyValue(name).trim() || otherwise;
  return {
    text: of('--jdt-text-quiet', '#616161'),
    grid: of('--jdt-border', '#e0e0e0'),
    band: 'rgba(0, 114, 178, 0.18)',
    mean: '#0072b2'
  };
}
