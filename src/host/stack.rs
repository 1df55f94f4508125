//! Go's stack traces: buildkitd ends with an error and the way to it, twenty lines that would push the error itself out
//! of its last words.

/// Leaves the frames out: a function, and below it its file and line.
pub(super) fn without_stack<T: AsRef<str>>(lines: Vec<T>) -> Vec<T> {
    let mut kept: Vec<T> = Vec::with_capacity(lines.len());
    for line in lines {
        if !is_place(line.as_ref()) {
            kept.push(line);
        } else if kept.last().is_some_and(|function| !function.as_ref().contains(' ')) {
            kept.pop();
        }
    }
    kept
}

/// `runtime/proc.go:290`
fn is_place(line: &str) -> bool {
    let Some((file, number)) = line.trim().rsplit_once(':') else { return false };
    let source = [".go", ".s"].iter().any(|ending| file.ends_with(ending));
    source && !file.contains(' ') && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_stays_and_the_way_to_it_goes() {
        let said = "time=\"…\" level=info msg=\"auto snapshotter: using overlayfs\"\n\
                    buildkitd: failed to find runc binary\n\
                    github.com/moby/buildkit/worker/runc.NewWorkerOpt\n\
                    \tgithub.com/moby/buildkit@v0.34.2/worker/runc/runc.go:68\n\
                    github.com/urfave/cli/v3.(*Command).Run\n\
                    \tgithub.com/urfave/cli/v3@v3.11.0/command_run.go:95\n\
                    runtime.goexit\n\
                    \truntime/asm_amd64.s:1771\n\
                    [kiln] exited with status 1";
        let kept = without_stack(said.lines().collect());
        assert_eq!(kept.len(), 3, "{kept:?}");
        assert_eq!(kept[1], "buildkitd: failed to find runc binary");
        assert_eq!(kept[2], "[kiln] exited with status 1");
    }

    #[test]
    fn what_only_looks_alike_stays() {
        let said = vec!["cannot read main.go:12", "http://127.0.0.1:80", "x.go:", "main.go"];
        assert_eq!(without_stack(said.clone()), said);
        assert_eq!(without_stack(vec!["one two", "\ta/b.go:1"]), ["one two"]);
    }
}
