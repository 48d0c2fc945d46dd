/**
 * Describe a node: in one line, and in full.
 */

import type { INode, Translate } from '../../protocol/types';
import { formatBytes, formatRate } from '../format';
import { formatRankCount } from '../summary';
import type { INodeRow } from './rows';

export interface INodeText {
  /** For the row. */
  brief: string;
  /** For the tooltip, a line each. */
  details: string[];
}

/**
 * @param isOnlyNode - the header of the view then has the number of ranks
 */
export function describeNode(
  { node, ranks }: INodeRow,
  isOnlyNode: boolean,
  trans: Translate
): INodeText {
  const count = formatRankCount(ranks.length, trans);
  if (node === undefined) {
    return { brief: count, details: [count] };
  }
  const load = trans('load %1', node.load.toFixed(1));
  return {
    brief: [...(isOnlyNode ? [] : [count]), load, briefMemory(node)].join(
      ' · '
    ),
    details: [count, ...details(node, load, trans)]
  };
}

function briefMemory(node: INode): string {
  const used = (node.memory_used_bytes / 2 ** 30).toFixed(1);
  return `${used}/${formatBytes(node.memory_total_bytes)}`;
}

function details(node: INode, load: string, trans: Translate): string[] {
  const used = formatBytes(node.memory_used_bytes);
  const total = formatBytes(node.memory_total_bytes);
  const received = formatRate(node.received_bytes_per_s);
  const sent = formatRate(node.sent_bytes_per_s);
  const infiniband =
    node.infiniband_received_bytes_per_s + node.infiniband_sent_bytes_per_s;
  return [
    trans(
      '%1 cores %2 % busy',
      String(node.cores),
      node.cpu_percent.toFixed(0)
    ),
    load,
    trans('memory %1 of %2', used, total),
    trans('disk %1 free', formatBytes(node.disk_free_bytes)),
    `↓ ${received} ↑ ${sent}`,
    ...(infiniband > 0 ? [trans('InfiniBand %1', formatRate(infiniband))] : [])
  ];
}
