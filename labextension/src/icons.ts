/**
 * The icons of the commands.
 */

import { LabIcon } from '@jupyterlab/ui-components';

import ranksSvg from '../style/icons/ranks.svg';
import runCellSvg from '../style/icons/run-cell.svg';
import stopRanksSvg from '../style/icons/stop-ranks.svg';
import startRanksSvg from '../style/icons/start-ranks.svg';

export const startRanksIcon = new LabIcon({
  name: 'jupyter-disttrain:start-ranks',
  svgstr: startRanksSvg
});

export const runCellIcon = new LabIcon({
  name: 'jupyter-disttrain:run-cell',
  svgstr: runCellSvg
});

export const stopRanksIcon = new LabIcon({
  name: 'jupyter-disttrain:stop-ranks',
  svgstr: stopRanksSvg
});

export const ranksIcon = new LabIcon({
  name: 'jupyter-disttrain:ranks',
  svgstr: ranksSvg
});
