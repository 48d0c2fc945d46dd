/**
 * A dialog inside the view, because webviews need not support modal dialogs.
 */

import type { Translate } from '../protocol/types';
import { button, element } from './dom';

export class Confirmation {
  readonly node = element('div', {
    class: 'jdt-confirm',
    role: 'alertdialog',
    hidden: ''
  });
  private close: (isAccepted: boolean) => void = () => undefined;

  constructor(private readonly trans: Translate) {
    this.node.addEventListener('keydown', event => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        this.close(false);
      }
    });
  }

  /** Open the dialog; resolves to whether the user accepts. */
  async open(
    title: string,
    body: string,
    acceptLabel: string
  ): Promise<boolean> {
    this.close(false); // an earlier dialog
    const before = document.activeElement;
    const cancel = button(this.trans('Cancel'), '', () => {
      this.close(false);
    });
    const accept = button(acceptLabel, '', () => {
      this.close(true);
    });
    accept.classList.add('jdt-danger');
    this.node.setAttribute('aria-label', title);
    this.node.replaceChildren(
      element('strong', {}, title),
      element('p', {}, body),
      element('span', { class: 'jdt-confirm-buttons' }, cancel, accept)
    );
    this.node.hidden = false;
    cancel.focus();
    this.node.scrollIntoView({ block: 'nearest' });
    const isAccepted = await new Promise<boolean>(resolve => {
      this.close = resolve;
    });
    this.node.hidden = true;
    if (before instanceof HTMLElement) {
      before.focus();
    }
    return isAccepted;
  }
}
