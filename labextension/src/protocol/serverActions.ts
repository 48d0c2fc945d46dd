/**
 * Actions as requests to this package's server extension.
 *
 * Does not cover: login, base URL (panel/serverClient, widget/actions).
 */

import { readLogs, readVariables } from './messages';
import type { IActions } from './types';

/** The path of the server extension below the base URL of Jupyter Server. */
export const API = 'disttrain/api';

/**
 * Make the actions.
 *
 * @param urlOf - returns the URL of a path below `API`
 * @param request - returns the content of a reply
 */
export function serverActions(
  urlOf: (path: string) => string,
  request: (url: string, method: 'GET' | 'POST') => Promise<unknown>
): IActions {
  return {
    request: async (id, action) => {
      await request(urlOf(`clusters/${id}/${action}`), 'POST');
    },
    log: async (id, selection) => {
      const url = urlOf(`clusters/${id}/log?rank=${String(selection)}`);
      return readLogs(await request(url, 'GET'));
    },
    logUrl: (id, rank) => urlOf(`clusters/${id}/log/file?rank=${String(rank)}`),
    variables: async id =>
      readVariables(await request(urlOf(`clusters/${id}/variables`), 'GET'))
  };
}
