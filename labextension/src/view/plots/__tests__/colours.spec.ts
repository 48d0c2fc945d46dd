import { describe, expect, it } from 'vitest';

import { colourOfRank, dashOfRank } from '../colours';

const RANKS = Array.from({ length: 64 }, (_, rank) => rank);

describe('colour and dash', () => {
  it('together are unique for 64 ranks', () => {
    const styles = RANKS.map(rank =>
      JSON.stringify([colourOfRank(rank), dashOfRank(rank)])
    );
    expect(new Set(styles).size).toBe(64);
  });

  it('both differ between neighbours', () => {
    for (const rank of RANKS.slice(1)) {
      expect(dashOfRank(rank)).not.toEqual(dashOfRank(rank - 1));
      expect(colourOfRank(rank)).not.toBe(colourOfRank(rank - 1));
    }
  });
});
