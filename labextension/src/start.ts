/**
 * The form from which ranks are started: the code that a cell will run.
 *
 * Does not cover: running it (commands).
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import { button, element, setText } from './view/dom';

/** The cell that starts ranks with options of %dist_init. */
export function startCode(options = ''): string {
  return `%load_ext jupyter_disttrain\n%dist_init${options && ` ${options}`}`;
}

/**
 * Make the form.
 *
 * @param onStart - takes the options of %dist_init
 */
export function startForm(
  trans: TranslationBundle,
  onStart: (options: string) => void
): HTMLElement {
  const ranks = element('input', {
    type: 'number',
    min: '1',
    placeholder: trans.__('one per GPU'),
    'aria-label': trans.__('number of ranks')
  });
  const hosts = element('input', {
    placeholder: trans.__('this machine'),
    title: trans.__('e.g. node1:4,node2:4'),
    'aria-label': trans.__('hosts')
  });
  const code = element('pre', {}, startCode());
  const options = (): string =>
    [
      ranks.value && `-n ${ranks.value}`,
      hosts.value.trim() && `--hosts ${hosts.value.replace(/\s+/g, '')}`
    ]
      .filter(Boolean)
      .join(' ');
  for (const input of [ranks, hosts]) {
    input.addEventListener('input', () => {
      setText(code, startCode(options()));
    });
  }
  return element(
    'div',
    { class: 'jdt-start' },
    element('label', {}, trans.__('ranks'), ranks),
    element('label', {}, trans.__('hosts'), hosts),
    code,
    button(
      trans.__('Start ranks for this notebook'),
      trans.__('from a new cell of the notebook that is open'),
      () => {
        onStart(options());
      }
    )
  );
}
