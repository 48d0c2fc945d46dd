/**
 * A question inside the view, for webviews have no dialogs of their own.
 */

import { button, element } from './dom';
import type { Translate } from './types';

export class Confirmation {
  readonly node = element('div', {
    class: 'jdt-confirm',
    role: 'alertdialog',
    hidden: ''
  });
  private answer: (isMeant: boolean) => void = () => undefined;

  constructor(private readonly trans: Translate) {
    this.node.addEventListener('keydown', event => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        this.answer(false);
      }
    });
  }

  /** Ask whether it is meant; resolves to the answer. */
  async ask(title: string, body: string, yes: string): Promise<boolean> {
    this.answer(false); // an earlier question
    const before = document.activeElement;
    const cancel = button(this.trans('Cancel'), '', () => {
      this.answer(false);
    });
    const accept = button(yes, '', () => {
      this.answer(true);
    });
    accept.classList.add('jdt-danger');
    this.node.setAttribute('aria-label', title);
    this.node.replaceChildren(
      element('strong', {}, title),
      element('p', {}, body),
      element('span', { class: 'jdt-answers' }, cancel, accept)
    );
    this.node.hidden = false;
    cancel.focus();
    this.node.scrollIntoView({ block: 'nearest' });
    const isMeant = await new Promise<boolean>(resolve => {
      this.answer = resolve;
    });
    this.node.hidden = true;
    if (before instanceof HTMLElement) {
      before.focus();
    }
    return isMeant;
  }
}
