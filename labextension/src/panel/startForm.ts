/**
 * The form that starts ranks.
 *
 * Does not cover: the code of the cell (startCode), running it (commands).
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import { button, element, setText } from '../view/dom';
import { startCode, startOptions } from './startCode';

/**
 * Make the form.
 *
 * @param onStart - called with the options of %dist_init
 */
export function makeStartForm(
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
  const options = (): string => startOptions(ranks.value, hosts.value);
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
      trans.__('from a new cell of the open notebook'),
      () => {
        onStart(options());
      }
    )
  );
}
