import { describe, expect, it } from 'vitest';

import {
  makeVariable,
  makeVariables,
  translate
} from '../../../__tests__/data';
import type { IVariable } from '../../../protocol/types';
import {
  describeEmpty,
  describeSilent,
  findVariables,
  formatRanks,
  type IVariableOrder,
  MAX_ROWS,
  nextOrder,
  sortState,
  summarizeVariables
} from '../variableRows';

const BY_NAME: IVariableOrder = { column: 'name', isDescending: false };
const LARGEST_FIRST: IVariableOrder = { column: 'size', isDescending: true };
const VARIABLES = [
  makeVariable('x10', { size_bytes: 24 }),
  makeVariable('x2', { size_bytes: 4000 }),
  makeVariable('batch', { ranks: '0', differs: true, value: '3' }),
  makeVariable('batch', { ranks: '1-3', differs: true, value: '4' }),
  makeVariable('Net', { size_bytes: 24 })
];

function namesOf(found: IVariable[]): string[] {
  return found.map(each => each.name);
}

describe('findVariables', () => {
  it('sorts names without regard to case, and numbers by value', () => {
    expect(namesOf(findVariables(VARIABLES, '', BY_NAME))).toEqual([
      'batch',
      'batch',
      'Net',
      'x2',
      'x10'
    ]);
    const backwards = { ...BY_NAME, isDescending: true };
    expect(namesOf(findVariables(VARIABLES, '', backwards))).toEqual([
      'x10',
      'x2',
      'Net',
      'batch',
      'batch'
    ]);
  });

  it('keeps the order of the ranks of one variable', () => {
    for (const isDescending of [false, true]) {
      const order = { ...BY_NAME, isDescending };
      const found = findVariables(VARIABLES, 'batch', order);
      expect(found.map(each => each.ranks)).toEqual(['0', '1-3']);
    }
  });

  it('sorts by size, with equal ones by name and those without last', () => {
    expect(namesOf(findVariables(VARIABLES, '', LARGEST_FIRST))).toEqual([
      'x2',
      'Net',
      'x10',
      'batch',
      'batch'
    ]);
    const smallest = { ...LARGEST_FIRST, isDescending: false };
    expect(namesOf(findVariables(VARIABLES, '', smallest))).toEqual([
      'Net',
      'x10',
      'x2',
      'batch',
      'batch'
    ]);
  });

  it('finds a part of a name in any case', () => {
    expect(namesOf(findVariables(VARIABLES, ' X1', BY_NAME))).toEqual(['x10']);
    expect(namesOf(findVariables(VARIABLES, 'n', BY_NAME))).toEqual(['Net']);
    expect(findVariables(VARIABLES, 'absent', BY_NAME)).toEqual([]);
  });
});

describe('nextOrder', () => {
  it('begins with the first name or the largest size, then reverses', () => {
    const bySize = nextOrder(BY_NAME, 'size');
    expect(bySize).toEqual(LARGEST_FIRST);
    expect(nextOrder(bySize, 'size').isDescending).toBe(false);
    expect(nextOrder(bySize, 'name')).toEqual(BY_NAME);
    expect(nextOrder(BY_NAME, 'name').isDescending).toBe(true);
  });
});

describe('sortState', () => {
  it('is that of the column that sorts', () => {
    expect(sortState(LARGEST_FIRST, 'size')).toBe('descending');
    expect(sortState(LARGEST_FIRST, 'name')).toBe('none');
    expect(sortState(BY_NAME, 'name')).toBe('ascending');
  });
});

describe('formatRanks', () => {
  it('is empty for a variable that is equal on all ranks', () => {
    expect(VARIABLES.map(each => formatRanks(each, translate))).toEqual([
      '',
      '',
      'rank 0',
      'ranks 1-3',
      ''
    ]);
  });
});

describe('describeSilent', () => {
  it.each([
    ['', ''],
    ['3', 'rank 3 does not reply'],
    ['1-2,12', 'ranks 1-2,12 do not reply']
  ])('of "%s" is "%s"', (silent, text) => {
    expect(describeSilent(silent, translate)).toBe(text);
  });
});

describe('describeEmpty', () => {
  it('distinguishes no variables from none that match', () => {
    const none = makeVariables([]);
    const some = makeVariables(VARIABLES);
    expect(describeEmpty(none, [], translate)).toBe(
      'no variables on ranks 0-3'
    );
    expect(describeEmpty(some, [], translate)).toBe(
      'no variable has this text in its name'
    );
    expect(describeEmpty(some, VARIABLES, translate)).toBe('');
    const silent = makeVariables([], { ranks: '', silent: '0-3' });
    expect(describeEmpty(silent, [], translate)).toBe('');
  });
});

describe('summarizeVariables', () => {
  const content = makeVariables(VARIABLES, {
    least_tensor_bytes: 4048,
    most_tensor_bytes: 4048
  });

  it('counts names, and states the memory of their tensors', () => {
    expect(summarizeVariables(content, VARIABLES, translate)).toBe(
      '4 variables · tensors: 4.0 kB per rank'
    );
  });

  it('states how many a search has found', () => {
    const found = findVariables(VARIABLES, 'x', BY_NAME);
    expect(summarizeVariables(content, found, translate)).toBe(
      '2 of 4 variables · tensors: 4.0 kB per rank'
    );
  });

  it('has the range where ranks hold different amounts', () => {
    const uneven = { ...content, most_tensor_bytes: 8e6 };
    expect(summarizeVariables(uneven, VARIABLES, translate)).toBe(
      '4 variables · tensors: 4.0 kB to 8.0 MB per rank'
    );
  });

  it('leaves tensors out where there are none', () => {
    const [, , ...plain] = VARIABLES;
    const one = makeVariables(plain.slice(0, 2));
    expect(summarizeVariables(one, one.variables, translate)).toBe(
      '1 variable'
    );
  });

  it('states that lines are left out', () => {
    const many = Array.from({ length: MAX_ROWS + 1 }, (_, at) =>
      makeVariable(`x${String(at)}`)
    );
    expect(summarizeVariables(makeVariables(many), many, translate)).toBe(
      '1,001 variables · only the first 1,000 lines'
    );
  });

  it('is empty as long as no rank has replied', () => {
    const silent = makeVariables([], { ranks: '', silent: '0-3' });
    expect(summarizeVariables(silent, [], translate)).toBe('');
  });
});
