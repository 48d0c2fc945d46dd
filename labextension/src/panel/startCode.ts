/**
 * The code of the cell that starts ranks.
 */

/** The cell with options of %dist_init. */
export function startCode(options = ''): string {
  return `%load_ext jupyter_disttrain\n%dist_init${options && ` ${options}`}`;
}

/** Options of %dist_init from the fields of the form; empty ones are left out. */
export function startOptions(ranks: string, hosts: string): string {
  const hostList = hosts.replace(/\s+/g, '');
  return [ranks && `-n ${ranks}`, hostList && `--hosts ${hostList}`]
    .filter(Boolean)
    .join(' ');
}
