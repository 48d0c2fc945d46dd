/**
 * The panel in JupyterLab's main area, where it can be docked and enlarged.
 */

import type { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import { MainAreaWidget, WidgetTracker } from '@jupyterlab/apputils';

import { ranksIcon } from '../icons';
import type { ClustersPanel } from './clustersPanel';

const NAME = 'jupyter-disttrain-main';

export class MainArea {
  private readonly tracker = new WidgetTracker<MainAreaWidget<ClustersPanel>>({
    namespace: NAME
  });

  constructor(
    private readonly shell: ILabShell,
    private readonly title: string,
    private readonly makePanel: () => ClustersPanel
  ) {}

  /** The panel, if it is open. */
  get panel(): ClustersPanel | null {
    return this.tracker.currentWidget?.content ?? null;
  }

  /** Open the panel again after a reload of the page. */
  restore(restorer: ILayoutRestorer, command: string): void {
    void restorer.restore(this.tracker, { command, name: () => NAME });
  }

  open(): void {
    let widget = this.tracker.currentWidget;
    if (widget === null) {
      const content = this.makePanel();
      content.addClass('jdt-main');
      widget = new MainAreaWidget({ content });
      widget.toolbar.hide(); // it is empty
      widget.id = NAME;
      widget.title.label = this.title;
      widget.title.icon = ranksIcon;
      void this.tracker.add(widget);
      this.shell.add(widget, 'main');
    }
    this.shell.activateById(widget.id);
  }
}
