/**
 * The magics that run a cell on ranks.
 */

/** The magic that runs a cell on every rank. */
export const RUN_ON_ALL_RANKS = '%%distributed';

const MAGIC = /^\s*%%(distributed|rank)(\s|$)/;

/** Whether a cell has such a magic, e.g. `%%distributed -r 0` or `%%rank [0]`. */
export function selectsRanks(source: string): boolean {
  return MAGIC.test(source);
}
