/**
 * Choose, sort and describe the variables of ranks.
 *
 * Covers: search by name, the order, texts of ranks, totals, and notes.
 * Does not cover: when they are read (refresh), DOM (variablesView).
 */

import type { IVariable, IVariables, Translate } from '../../protocol/types';
import { formatCount, formatSize } from '../format';

/** Variables that are drawn. */
export const MAX_ROWS = 1000;

export type SortColumn = 'name' | 'size';

export interface IVariableOrder {
  column: SortColumn;
  isDescending: boolean;
}

/** The order after a click on a column: the other way, or as it is read first. */
export function nextOrder(
  order: IVariableOrder,
  column: SortColumn
): IVariableOrder {
  const isDescending =
    column === order.column ? !order.isDescending : column === 'size';
  return { column, isDescending };
}

/** The value of aria-sort of a column. */
export function sortState(
  order: IVariableOrder,
  column: SortColumn
): 'ascending' | 'descending' | 'none' {
  if (column !== order.column) {
    return 'none';
  }
  return order.isDescending ? 'descending' : 'ascending';
}

/** The variables whose names contain a text, in any case; those without a size last. */
export function findVariables(
  variables: IVariable[],
  search: string,
  { column, isDescending }: IVariableOrder
): IVariable[] {
  const lower = search.trim().toLowerCase();
  const sign = isDescending ? -1 : 1;
  return variables
    .filter(each => each.name.toLowerCase().includes(lower))
    .toSorted((a, b) =>
      column === 'name'
        ? sign * compareNames(a, b)
        : compareSizes(a, b, sign) || compareNames(a, b)
    );
}

function compareNames(a: IVariable, b: IVariable): number {
  return a.name.localeCompare(b.name, 'en', { numeric: true });
}

function compareSizes(a: IVariable, b: IVariable, sign: number): number {
  if (a.size_bytes === null || b.size_bytes === null) {
    return Number(a.size_bytes === null) - Number(b.size_bytes === null);
  }
  return sign * (a.size_bytes - b.size_bytes);
}

/** The ranks on which a variable is as shown; empty if it is so on all. */
export function formatRanks(variable: IVariable, trans: Translate): string {
  return variable.differs ? labelRanks(variable.ranks, trans) : '';
}

function isOne(ranks: string): boolean {
  return /^\d+$/.test(ranks);
}

function labelRanks(ranks: string, trans: Translate): string {
  return isOne(ranks) ? trans('rank %1', ranks) : trans('ranks %1', ranks);
}

/** State which ranks have not replied; empty if all have. */
export function describeSilent(silent: string, trans: Translate): string {
  if (silent === '') {
    return '';
  }
  return isOne(silent)
    ? trans('rank %1 does not reply', silent)
    : trans('ranks %1 do not reply', silent);
}

/** Why no variable is shown; empty if some are. */
export function describeEmpty(
  { variables, ranks }: IVariables,
  found: IVariable[],
  trans: Translate
): string {
  if (found.length > 0 || ranks === '') {
    return '';
  }
  return variables.length === 0
    ? trans('no variables on %1', labelRanks(ranks, trans))
    : trans('no variable has this text in its name');
}

/**
 * The number of variables, and the memory of the tensors of each rank; empty as
 * long as no rank has replied.
 */
export function summarizeVariables(
  content: IVariables,
  found: IVariable[],
  trans: Translate
): string {
  if (content.ranks === '') {
    return '';
  }
  const [all, some] = [countNames(content.variables), countNames(found)];
  const total =
    all === 1 ? trans('1 variable') : trans('%1 variables', formatCount(all));
  const count =
    some === all ? total : trans('%1 of %2', formatCount(some), total);
  const cut =
    found.length > MAX_ROWS
      ? trans('only the first %1 lines', formatCount(MAX_ROWS))
      : '';
  return [count, describeTensors(content, trans), cut]
    .filter(Boolean)
    .join(' · ');
}

function countNames(variables: IVariable[]): number {
  return new Set(variables.map(each => each.name)).size;
}

function describeTensors(content: IVariables, trans: Translate): string {
  if (content.most_tensor_bytes === 0) {
    return '';
  }
  const least = formatSize(content.least_tensor_bytes);
  const most = formatSize(content.most_tensor_bytes);
  return least === most
    ? trans('tensors: %1 per rank', most)
    : trans('tensors: %1 to %2 per rank', least, most);
}
