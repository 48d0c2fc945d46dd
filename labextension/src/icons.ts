/**
 * The icons: four ranks around what the command does with them.
 */

import { LabIcon } from '@jupyterlab/ui-components';

import ranksSvg from '../style/icons/ranks.svg';
import runCellSvg from '../style/icons/run-cell.svg';
import shutDownRanksSvg from '../style/icons/shut-down-ranks.svg';
import startRanksSvg from '../style/icons/start-ranks.svg';

export const startRanksIcon = new LabIcon({
  name: 'jupyter-disttrain:start-ranks',
  svgstr: startRanksSvg
});

export const runCellIcon = new LabIcon({
  name: 'jupyter-disttrain:run-cell',
  svgstr: runCellSvg
});

export const shutDownRanksIcon = new LabIcon({
  name: 'jupyter-disttrain:shut-down-ranks',
  svgstr: shutDownRanksSvg
});

export const ranksIcon = new LabIcon({
  name: 'jupyter-disttrain:ranks',
  svgstr: ranksSvg
});
