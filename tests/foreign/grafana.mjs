// Compares dashboards with the schema of Grafana, which is published as types: each field has to exist and to have one of
// its values. Panels are compared with the type of their plugin.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
const modules = process.env.MODULES;
const ts = createRequire(modules + "/")("typescript");

const plugins = {
  row: "RowPanel",
  stat: "PanelOf<Stat.Options, unknown>",
  timeseries: "PanelOf<TimeSeries.Options, TimeSeries.FieldConfig>",
};
const plugin = (name) => `./node_modules/@grafana/schema/dist/types/raw/composable/${name}/panelcfg/x/types.gen`;
const { panels, ...board } = JSON.parse(readFileSync(process.argv[2], "utf8"));

// In JSON a value of an enum is its text, and the queries are those of the data source for Prometheus.
const source = [
  `import type { Dashboard, Panel, RowPanel } from "@grafana/schema";
import type * as Stat from "${plugin("stat")}";
import type * as TimeSeries from "${plugin("timeseries")}";
type Query = {
  refId: string; datasource: { type: "prometheus"; uid: string }; editorMode: "code";
  expr: string; legendFormat: string; range?: boolean; instant?: boolean;
};
type PanelOf<O, F> = Omit<Panel<O, F>, "options" | "targets"> & { options: Partial<O>; targets: Query[] };
type Json<T> = unknown extends T ? T
  : T extends string ? \`\${T}\`
  : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Json<U>[]
  : { [K in keyof T]: Json<T[K]> };`,
  `export const board: Json<Omit<Dashboard, "panels">> = ${JSON.stringify(board, null, 1)};`,
  ...panels.map((panel, at) => {
    const type = plugins[panel.type];
    if (!type) throw new Error(`no type for panels of ${panel.type}`);
    return `export const panel${at}: Json<${type}> = ${JSON.stringify(panel, null, 1)};`;
  }),
].join("\n");

const file = join(modules, `dashboard-${process.pid}.ts`);
const options = {
  strict: true, noEmit: true, skipLibCheck: true, types: [],
  module: ts.ModuleKind.ESNext, moduleResolution: ts.ModuleResolutionKind.Bundler, target: ts.ScriptTarget.ES2022,
};
const host = ts.createCompilerHost(options);
const read = host.getSourceFile;
host.getSourceFile = (name, ...rest) =>
  name === file ? ts.createSourceFile(name, source, options.target) : read(name, ...rest);
const exists = host.fileExists;
host.fileExists = (name) => name === file || exists(name);
const found = ts.getPreEmitDiagnostics(ts.createProgram([file], options, host));
const format = { getCurrentDirectory: () => modules, getCanonicalFileName: (name) => name, getNewLine: () => "\n" };
for (const one of found) {
  const at = one.start === undefined ? "" : source.slice(one.start, one.start + 60).split("\n")[0];
  console.log(`${at} ${ts.formatDiagnostic(one, format)}`);
}
console.log(`${panels.length} panels, ${found.length} errors`);
process.exitCode = found.length ? 1 : 0;
