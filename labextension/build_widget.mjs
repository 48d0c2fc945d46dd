/**
 * Bundle the widget of the notebook for anywidget: one module, one style sheet.
 * Run after tsc.
 */

import { mkdir, readFile, writeFile } from 'node:fs/promises';
import path from 'node:path';
import { promisify } from 'node:util';

import { rspack } from '@rspack/core';

const here = import.meta.dirname;
const out = path.join(here, '../jupyter_disttrain/notebook/static');

const compiler = rspack({
  mode: 'production',
  target: ['web', 'es2022'],
  context: here,
  entry: { widget: './lib/widget/index.js' },
  output: {
    path: out,
    filename: '[name].js',
    module: true,
    library: { type: 'module' }
  },
  devtool: false
});
const stats = await promisify(compiler.run.bind(compiler))();
if (stats.hasErrors()) {
  throw new Error(stats.toString({ errors: true }));
}
await promisify(compiler.close.bind(compiler))();

const sheets = [
  'node_modules/uplot/dist/uPlot.min.css',
  'style/view.css',
  'style/variables.css'
];
const texts = await Promise.all(
  sheets.map(sheet => readFile(path.join(here, sheet), 'utf8'))
);
await mkdir(out, { recursive: true });
await writeFile(path.join(out, 'widget.css'), texts.join('\n'));
