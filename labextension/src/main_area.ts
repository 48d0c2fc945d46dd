/**
 * The ranks in JupyterLab's main area, where they can be docked and enlarged.
 */

import type { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import { MainAreaWidget, WidgetTracker } from '@jupyterlab/apputils';

import { ranksIcon } from './icons';
import type { ClustersPanel } from './panel';

const NAME = 'jupyter-disttrain-main';

export class MainArea {
  private readonly tracker = new WidgetTracker<MainAreaWidget<ClustersPanel>>({
    namespace: NAME
  });

  constructor(
    private readonly shell: ILabShell,
    private readonly title: string,
    private readonly make: () => ClustersPanel
  ) {}

  /** The panel that is open there, if one is. */
  get panel(): ClustersPanel | null {
    return this.tracker.currentWidget?.content ?? null;
  }

  /** Open it again after a reload of the page. */
  restore(restorer: ILayoutRestorer, command: string): void {
    void restorer.restore(this.tracker, { command, name: () => NAME });
  }

  open(): void {
    let widget = this.tracker.currentWidget;
    if (widget === null) {
      const content = this.make();
      content.addClass('jdt-main');
      widget = new MainAreaWidget({ content });
      widget.toolbar.hide(); // it would be an empty strip
      widget.id = NAME;
      widget.title.label = this.title;
      widget.title.icon = ranksIcon;
      void this.tracker.add(widget);
      this.shell.add(widget, 'main');
    }
    this.shell.activateById(widget.id);
  }
}
