/**
 * The anywidget that shows a cluster in a notebook's output.
 *
 * Covers: passing the model's state and messages to the view.
 * Does not cover: requests of the view (actions).
 */

import {
  isCluster,
  isDeviceHistory,
  isRecord,
  readBufferedMetrics
} from '../protocol/messages';
import { ClusterStore } from '../stores/clusterStore';
import { ClusterView } from '../view/clusterView';
import { formatMessage } from '../view/format';
import { type IModel, makeActions } from './actions';

interface IRenderContext {
  model: IModel;
  el: HTMLElement;
}

/** By the model's key, as anywidget passes different objects for one model. */
const stores = new Map<string, ClusterStore>();

function addMessage(
  store: ClusterStore,
  content: unknown,
  buffers: unknown
): void {
  if (!isRecord(content)) {
    return;
  }
  if (isDeviceHistory(content.devices)) {
    store.addDevices(content.devices);
  }
  const metrics = readBufferedMetrics(content.metrics, buffers);
  if (metrics !== null) {
    store.addMetrics(metrics);
  }
}

/** Receive messages before a view exists: a busy kernel cannot repeat them. */
function initialize({ model }: { model: IModel }): () => void {
  const store = new ClusterStore();
  const key = String(model.get('key'));
  stores.set(key, store);
  const onMessage = (...args: unknown[]): void => {
    addMessage(store, args[0], args[1]);
  };
  model.on('msg:custom', onMessage);
  // After a reload of the page, earlier messages are lost.
  model.send({ ask: 'history' });
  return () => {
    stores.delete(key);
    model.off('msg:custom', onMessage);
  };
}

function render({ model, el }: IRenderContext): () => void {
  const store = stores.get(String(model.get('key'))) ?? new ClusterStore();
  // No front end offers translations to a widget.
  const view = new ClusterView(makeActions(model), formatMessage, store);
  el.append(view.node);
  const showState = (): void => {
    const cluster = model.get('state');
    if (isCluster(cluster)) {
      view.show(cluster);
    }
    const ended = model.get('ended');
    if (typeof ended === 'string' && ended) {
      view.end(ended);
    }
  };
  model.on('change:state', showState);
  model.on('change:ended', showState);
  showState();
  const themeObserver = new MutationObserver(() => {
    view.restyle();
  });
  themeObserver.observe(document.body, {
    attributeFilter: ['data-jp-theme-name', 'class']
  });
  return () => {
    themeObserver.disconnect();
    model.off('change:state', showState);
    model.off('change:ended', showState);
    view.destroy();
  };
}

export default { initialize, render };
