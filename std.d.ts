// Types of the few functions used from the standard library, whose npm copy carries none.
// Map the two names in deno.json to `jsr:` and this file can go.

declare module "@std/cli" {
  /** Options of {@linkcode parseArgs}, as far as they are used here. */
  export interface ParseOptions {
    string?: readonly string[];
    boolean?: readonly string[];
    collect?: readonly string[];
    alias?: Record<string, string>;
    default?: Record<string, unknown>;
    stopEarly?: boolean;
    /** Called for each argument that no option names; `false` keeps it out of the result. */
    unknown?: (arg: string, key?: string, value?: unknown) => unknown;
  }
  export function parseArgs(
    args: readonly string[],
    options?: ParseOptions,
  ): { _: (string | number)[]; [flag: string]: unknown };
}

declare module "@std/assert" {
  export function assert(expr: unknown, msg?: string): asserts expr;
  export function assertEquals<T>(actual: T, expected: T, msg?: string): void;
  export function assertNotEquals<T>(actual: T, expected: T, msg?: string): void;
  export function assertExists<T>(actual: T, msg?: string): asserts actual is NonNullable<T>;
  export function assertAlmostEquals(
    actual: number,
    expected: number,
    tolerance?: number,
    msg?: string,
  ): void;
  export function assertGreater<T>(actual: T, expected: T, msg?: string): void;
  export function assertLess<T>(actual: T, expected: T, msg?: string): void;
  export function assertMatch(actual: string, expected: RegExp, msg?: string): void;
  export function assertStringIncludes(actual: string, expected: string, msg?: string): void;
  export function assertRejects<E extends Error = Error>(
    fn: () => PromiseLike<unknown>,
    // deno-lint-ignore no-explicit-any
    errorClass?: abstract new (...args: any[]) => E,
    msgIncludes?: string,
  ): Promise<E>;
  export function assertThrows<E extends Error = Error>(
    fn: () => unknown,
    // deno-lint-ignore no-explicit-any
    errorClass?: abstract new (...args: any[]) => E,
    msgIncludes?: string,
  ): E;
  export function fail(msg?: string): never;
}
